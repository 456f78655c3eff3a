"""Which statistics are asked for."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.core import SamplingParams
from scheduler_service.sampling import (
    Statistic,
    WantedStatistics,
    uniform,
    wanted_statistics,
    with_runner_up,
)
from scheduler_service.sampling.request import inverse_temperature


def _ask(params: SamplingParams, vocab_size: int = 1000, max_top_k: int = 300) -> WantedStatistics:
    return wanted_statistics(params, 17, vocab_size=vocab_size, max_top_k=max_top_k)


@pytest.mark.parametrize("temperature", [0.0, 9.9e-6])
def test_greedy_asks_for_the_argmax_alone(temperature: float) -> None:
    """Truncation does not matter then; edits do."""
    bias = ((3, 1.5),)
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.5, logit_bias=bias)
    assert _ask(params) == WantedStatistics(Statistic.ARGMAX, edits=bias)


def test_an_untruncated_draw_asks_for_the_quantile_token() -> None:
    """At the request's own u and temperature."""
    asked = _ask(SamplingParams(temperature=0.8, seed=5))
    assert asked.statistics == Statistic.QUANTILE | Statistic.NORMALIZER
    assert asked.top_k == 0
    assert asked.quantile == uniform(5, 17)
    assert asked.inverse_temperature == float(np.float32(1 / 0.8))


@pytest.mark.parametrize(
    ("params", "top_k"),
    [
        (SamplingParams(temperature=1, top_k=40), 40),
        (SamplingParams(temperature=1, top_k=400), 300),
        (SamplingParams(temperature=1, top_p=0.9), 256),
        (SamplingParams(temperature=1, min_p=0.1), 256),
        (SamplingParams(temperature=1, top_k=3, top_p=0.9, min_p=0.1), 3),
        (SamplingParams(temperature=1, top_k=5000, top_p=0.9), 256),
    ],
)
def test_truncation_asks_for_top_k(params: SamplingParams, top_k: int) -> None:
    """K is top-k or the default, at most what the executor gives."""
    asked = _ask(params)
    assert asked.statistics == Statistic.TOP_K | Statistic.NORMALIZER
    assert asked.top_k == top_k


def test_k_is_at_most_the_vocabulary() -> None:
    """A small vocabulary is read whole."""
    assert _ask(SamplingParams(temperature=1, top_p=0.9), vocab_size=10).top_k == 10


def test_top_k_of_the_whole_vocabulary_is_no_truncation() -> None:
    """It keeps all."""
    asked = _ask(SamplingParams(temperature=1, top_k=1000))
    assert asked.statistics == Statistic.QUANTILE | Statistic.NORMALIZER


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1.0, 3.0, 1e30])
def test_inverse_temperature_is_a_normal_fp32_number(temperature: float) -> None:
    """Rounded to fp32, never so small that a device could flush it."""
    inverse = inverse_temperature(SamplingParams(temperature=temperature))
    assert float(np.float32(inverse)) == inverse
    assert inverse >= 2**-60
    if temperature < 1e6:
        assert inverse == pytest.approx(1 / temperature, rel=1e-6)


def test_statistic_bits_are_those_of_the_contract() -> None:
    """The executor reads these numbers."""
    expected = {
        "ARGMAX": 1,
        "TOP_K": 2,
        "NORMALIZER": 4,
        "QUANTILE": 8,
        "NAMED": 16,
        "FULL_ROW": 32,
        "DIGEST": 64,
    }
    assert {statistic.name: statistic.value for statistic in Statistic} == expected


@pytest.mark.parametrize(
    ("params", "max_top_k", "top_k"),
    [
        (SamplingParams(), 300, 2),
        (SamplingParams(), 1, 1),
        (SamplingParams(temperature=1), 300, 2),
        (SamplingParams(temperature=1, top_k=1), 300, 2),
        (SamplingParams(temperature=1, top_k=40), 300, 40),
    ],
)
def test_the_two_largest_are_asked_for_beside_what_decides(
    params: SamplingParams, max_top_k: int, top_k: int
) -> None:
    question = _ask(params, max_top_k=max_top_k)
    asked = with_runner_up(question, vocab_size=1000, max_top_k=max_top_k)
    assert asked.statistics == question.statistics | Statistic.TOP_K
    assert asked.top_k == top_k
    assert (asked.quantile, asked.edits) == (question.quantile, question.edits)
