"""Choosing a token: a pure function of parameters, row statistics and one random number.

The rule (docs/numerics.md, section 5), over ids in the order (logit descending, id ascending),
with w the fp32 weights and every sum a chain of fp64 additions in that order:

- top-k keeps the first k; a k of 0 or not below the vocabulary turns it off. The total is the
  sum of what it kept, or Z where it is off.
- top-p keeps the shortest prefix whose sum is at least top_p * total.
- min-p keeps the prefix before the first w below fp32(min_p). (Not every w of that size: the
  exponential is not monotone in its last bit, so only a prefix can be told from K entries.)
- The token is the first kept one whose running sum exceeds u * (sum of the kept), else the last.

`choose` applies it to the K likeliest ids; where these do not decide, it says so, and
`choose_from_full_row` applies the same rule to the whole row.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np

from scheduler_service.core.params import SamplingParams
from scheduler_service.sampling.request import (
    effective_top_k,
    inverse_temperature,
    is_greedy,
    is_truncated,
)
from scheduler_service.sampling.statistics import (
    RowStatistics,
    quantile_token,
    running_chunk_sums,
    total_order,
    weights,
)
from scheduler_service.sampling.x1_exp import F32


class Undecided(Enum):
    """Why there is no token yet."""

    NEED_FULL_ROW = "need_full_row"


NEED_FULL_ROW: Final = Undecided.NEED_FULL_ROW


def choose(params: SamplingParams, stats: RowStatistics, u: float) -> int | Undecided:
    """Return the token, or NEED_FULL_ROW where the K entries of `stats` do not decide it.

    Args:
        params: Valid parameters.
        stats: The answer to `wanted_statistics(params, ...)`.
        u: The quantile of that question.
    """
    if is_greedy(params):
        return stats.argmax_id
    if not is_truncated(params, stats.vocab_size):
        return stats.quantile_id
    if stats.top_k_ids is None or stats.top_k_weights is None:
        return NEED_FULL_ROW
    index = _draw(params, stats.top_k_weights, stats.vocab_size, stats.normalizer, u)
    return NEED_FULL_ROW if index is None else int(stats.top_k_ids[index])


def choose_from_full_row(params: SamplingParams, logits: F32, u: float) -> int:
    """Return the token of a full row.

    Args:
        params: Valid parameters.
        logits: (V,) float32, finite, edits applied.
        u: Quantile in [0, 1), an fp32 value.
    """
    if is_greedy(params):
        return int(np.argmax(logits))
    row_weights = weights(logits, inverse_temperature(params))
    if not is_truncated(params, len(logits)):
        return quantile_token(row_weights, u)
    order = total_order(logits)
    normalizer = float(running_chunk_sums(row_weights)[-1])
    index = _draw(params, row_weights[order], len(logits), normalizer, u)
    if index is None:
        raise AssertionError("[sampler] a full row must decide, got no token")
    return int(order[index])


def _draw(
    params: SamplingParams, ordered: F32, vocab_size: int, normalizer: float, u: float
) -> int | None:
    """Return an index into the first entries of the order, or None where they do not decide."""
    top_k = effective_top_k(params, vocab_size)
    num_in_order = top_k or vocab_size
    ordered = ordered[:num_in_order]
    is_complete = len(ordered) == num_in_order
    sums = np.add.accumulate(ordered, dtype=np.float64)
    num_kept = len(ordered)
    is_cut_inside = is_complete
    if params.top_p < 1:
        if top_k and not is_complete:
            return None
        total = float(sums[-1]) if top_k else normalizer
        prefix = int(np.searchsorted(sums, params.top_p * total, side="left")) + 1
        if prefix <= num_kept:
            num_kept = prefix
            is_cut_inside = True
    if params.min_p > 0:
        below = np.flatnonzero(ordered[:num_kept] < np.float32(params.min_p))
        if len(below):
            num_kept = int(below[0])
            is_cut_inside = True
    if not is_cut_inside:
        return None
    target = u * float(sums[num_kept - 1])
    index = int(np.searchsorted(sums[:num_kept], target, side="right"))
    return min(index, num_kept - 1)
