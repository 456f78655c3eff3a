"""Choosing tokens: hand-made rows whose answer is known, and when the full row is needed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler_service.core import SamplingParams
from scheduler_service.sampling import (
    NEED_FULL_ROW,
    RowStatistics,
    choose,
    choose_from_full_row,
    row_statistics,
    uniform,
)

# Weights 1, 1/2, 1/4, 1/8, 1/16 up to rounding, at ids 4, 2, 0, 3, 1.
LOGITS = np.array([-2, -4, -1, -3, 0], dtype=np.float32) * np.float32(np.log(2))
ORDER = [4, 2, 0, 3, 1]


def _tokens(
    params: SamplingParams, logits: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> set[int]:
    grid = [step / 256 for step in range(256)]
    return {choose_from_full_row(params, logits, u) for u in grid}


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_argmax(temperature: float) -> None:
    """Whatever else is asked for, from statistics and from the row."""
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.5, min_p=0.5)
    assert choose(params, RowStatistics(vocab_size=5, argmax_id=4), 0.99) == 4
    assert choose_from_full_row(params, LOGITS, 0.99) == 4


def test_an_untruncated_draw_takes_the_quantile_token() -> None:
    """The executor has already decided."""
    params = SamplingParams(temperature=1.0)
    assert choose(params, RowStatistics(vocab_size=5, quantile_id=3), 0.5) == 3


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1, top_k=1), 1),
        (SamplingParams(temperature=1, top_k=3), 3),
        (SamplingParams(temperature=1, top_p=0.0), 1),
        (SamplingParams(temperature=1, top_p=0.5), 1),
        (SamplingParams(temperature=1, top_p=0.6), 2),
        (SamplingParams(temperature=1, top_p=0.99), 5),
        (SamplingParams(temperature=1, min_p=1.0), 1),
        (SamplingParams(temperature=1, min_p=0.4), 2),
        (SamplingParams(temperature=1, min_p=0.01), 5),
        (SamplingParams(temperature=1, top_k=4, top_p=0.95, min_p=0.2), 3),
        # top-p shares out what top-k kept: 1 + 1/2 of 1.5 + 1/4.
        (SamplingParams(temperature=1, top_k=3, top_p=0.8), 2),
        # A low temperature squares the weights: 1, 1/4, 1/16, ...
        (SamplingParams(temperature=0.5, min_p=0.2), 2),
    ],
)
def test_filters_keep_a_prefix_of_the_order(params: SamplingParams, kept: int) -> None:
    """Over all u, exactly the kept tokens are drawn."""
    assert _tokens(params, LOGITS) == set(ORDER[:kept])


def test_equal_logits_are_ordered_by_id() -> None:
    """Top-k of a flat row keeps the lowest ids."""
    flat = np.zeros(100, dtype=np.float32)
    assert _tokens(SamplingParams(temperature=1, top_k=3), flat) == {0, 1, 2}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=4),
        SamplingParams(temperature=1, top_k=4, top_p=0.5),
        SamplingParams(temperature=1, top_p=0.95),
        SamplingParams(temperature=1, min_p=0.05),
        SamplingParams(temperature=1, top_p=0.95, min_p=0.05),
    ],
)
def test_what_k_entries_do_not_decide_needs_the_full_row(params: SamplingParams) -> None:
    """Three entries do not hold the border of any of these cuts."""
    assert choose(params, row_statistics(LOGITS, top_k=3), 0.1) is NEED_FULL_ROW


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=3),
        SamplingParams(temperature=1, top_k=2, top_p=0.9),
        SamplingParams(temperature=1, top_p=0.7),
        SamplingParams(temperature=1, min_p=0.3),
        SamplingParams(temperature=1, top_p=0.95, min_p=0.3),
        SamplingParams(temperature=1, top_k=4, min_p=0.3),
    ],
)
def test_what_k_entries_decide_is_what_the_row_gives(params: SamplingParams) -> None:
    """For every u."""
    for u in (0.0, 0.3, 0.6, 0.9, 1 - 2**-24):
        stats = row_statistics(LOGITS, u=u, top_k=3)
        assert choose(params, stats, u) == choose_from_full_row(params, LOGITS, u)


def test_a_running_sum_must_exceed_its_target() -> None:
    """Four equal weights and u = 1/4: the first sum equals the target, so the second id wins."""
    flat = np.zeros(10, dtype=np.float32)
    params = SamplingParams(temperature=1, top_k=4)
    assert [choose_from_full_row(params, flat, u) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]


def test_a_u_of_one_would_be_the_last_kept() -> None:
    """No draw gives it; the rule still has an answer."""
    assert choose_from_full_row(SamplingParams(temperature=1, top_k=3), LOGITS, 1.0) == ORDER[2]


def test_min_p_keeps_a_prefix_where_weights_are_not_in_order() -> None:
    """The third id weighs enough, but the second, of a larger logit, does not."""
    lower = np.float32(float.fromhex("-0x1.fd029cp-7"))
    higher = np.nextafter(lower, np.float32(0))
    logits = np.array([0, higher, lower], dtype=np.float32)
    stats = row_statistics(logits, top_k=3)
    assert stats.top_k_weights is not None
    min_p = float(stats.top_k_weights[2])
    assert stats.top_k_weights[1] < min_p
    assert _tokens(SamplingParams(temperature=1, min_p=min_p), logits) == {0}


def test_sums_are_kept_in_fp64() -> None:
    """1,999 weights of about 2^-25 vanish beside 1 in fp32; together they must count."""
    logits = np.full(3000, -25 * np.log(2), dtype=np.float32)
    logits[0] = 0
    assert (
        choose_from_full_row(SamplingParams(temperature=1, top_k=2000), logits, 1 - 2**-24) > 1000
    )


def test_missing_top_k_statistics_need_the_full_row() -> None:
    """An executor may leave them out."""
    params = SamplingParams(temperature=1, top_k=2)
    assert choose(params, RowStatistics(vocab_size=5), 0.5) is NEED_FULL_ROW


@pytest.mark.parametrize("top_k", [2, 4])
def test_frequencies_follow_the_weights(top_k: int) -> None:
    """10,000 draws by position: each token's share is within 5 sigma of its probability."""
    params = SamplingParams(temperature=1, top_k=top_k, seed=3)
    stats = row_statistics(LOGITS, top_k=top_k)
    counts = Counter(
        choose(params, stats, uniform(params.seed, position)) for position in range(10_000)
    )
    assert set(counts) == set(ORDER[:top_k])
    mass = sum(2.0**-rank for rank in range(top_k))
    for rank, token_id in enumerate(ORDER[:top_k]):
        share = 2.0**-rank / mass
        sigma = (10_000 * share * (1 - share)) ** 0.5
        assert abs(counts[token_id] - 10_000 * share) < 5 * sigma
