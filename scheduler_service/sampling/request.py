"""Which statistics decide a token: the question a wanted position puts to the executor."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from scheduler_service.core.params import SamplingParams
from scheduler_service.sampling.rng import uniform
from scheduler_service.sampling.statistics import Statistic

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as 0 is: there the softmax is the argmax in fp32."""

DEFAULT_TOP_K: Final = 256
"""Entries asked for when top-p or min-p cut a row and top-k does not.

Enough to decide all but flat rows: a full row costs milliseconds, an entry next to nothing.
"""

_LEAST_INVERSE_TEMPERATURE: Final = 2.0**-60


class WantedStatistics(NamedTuple):
    """The question for one wanted position.

    Attributes:
        statistics: What is asked for.
        top_k: K; 0 without TOP_K.
        inverse_temperature: An fp32 value above 0; 1 where it does not matter.
        quantile: u in [0, 1), an fp32 value; 0 where it does not matter.
        edits: (token id, added value) pairs, applied to the logits first.
    """

    statistics: Statistic
    top_k: int = 0
    inverse_temperature: float = 1.0
    quantile: float = 0.0
    edits: tuple[tuple[int, float], ...] = ()


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the token is the argmax."""
    return params.temperature < GREEDY_BELOW


def effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return top-k, or 0 where it keeps the whole vocabulary."""
    return params.top_k if params.top_k < vocab_size else 0


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether top-k, top-p or min-p may cut a row of `vocab_size` ids."""
    return effective_top_k(params, vocab_size) > 0 or params.top_p < 1 or params.min_p > 0


def is_chosen_by_executor(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether the statistics of `wanted_statistics` name the token itself.

    They do where it is the argmax or the quantile of the whole row: then the executor can go on
    with it before anybody has seen it.
    """
    return is_greedy(params) or not is_truncated(params, vocab_size)


def inverse_temperature(params: SamplingParams) -> float:
    """Return 1 / temperature rounded to fp32, at least 2^-60 because devices flush subnormals."""
    return float(np.float32(max(1.0 / params.temperature, _LEAST_INVERSE_TEMPERATURE)))


def with_runner_up(
    question: WantedStatistics, *, vocab_size: int, max_top_k: int
) -> WantedStatistics:
    """Return the question with the two largest logits added; the token stays what it was.

    `choose` takes from top-K entries only as many as the parameters keep.
    """
    top_k = max(question.top_k, min(2, vocab_size, max_top_k))
    return question._replace(statistics=question.statistics | Statistic.TOP_K, top_k=top_k)


def wanted_statistics(
    params: SamplingParams, drawn_position: int, *, vocab_size: int, max_top_k: int
) -> WantedStatistics:
    """Return the statistics that decide the token at `drawn_position`, as far as K allows.

    Args:
        params: Valid parameters.
        drawn_position: Absolute position of the token to be drawn.
        vocab_size: Width of the row.
        max_top_k: Most top-K entries that the executor gives.
    """
    edits = params.logit_bias
    if is_greedy(params):
        return WantedStatistics(Statistic.ARGMAX, edits=edits)
    statistics = Statistic.QUANTILE | Statistic.NORMALIZER
    top_k = 0
    if is_truncated(params, vocab_size):
        statistics = Statistic.TOP_K | Statistic.NORMALIZER
        top_k = effective_top_k(params, vocab_size) or DEFAULT_TOP_K
        top_k = min(top_k, max_top_k, vocab_size)
    return WantedStatistics(
        statistics,
        top_k=top_k,
        inverse_temperature=inverse_temperature(params),
        quantile=uniform(params.seed, drawn_position),
        edits=edits,
    )
