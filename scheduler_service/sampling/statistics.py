"""Row statistics: what an executor says about one wanted position, and their definition.

`row_statistics` computes them from a full row as docs/numerics.md, section 5, defines them. The
executor's kernels give the same bits; here they serve where a row was fetched in full.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_service.sampling.x1_exp import F32, x1_exp

I32 = NDArray[np.int32]

CHUNK: Final = 1024
LANES: Final = 256


class Statistic(IntFlag):
    """Statistics of a wanted position; the values are those of the executor's contract."""

    ARGMAX = 1
    TOP_K = 2
    NORMALIZER = 4
    QUANTILE = 8
    NAMED = 16
    FULL_ROW = 32
    DIGEST = 64


class RowStatistics(NamedTuple):
    """Statistics of one wanted position. What was not asked for keeps its default.

    Attributes:
        vocab_size: Width of the row.
        argmax_id: Lowest id of the largest logit.
        max_logit: The largest logit, an fp32 value.
        quantile_id: The token at quantile u of the weights.
        normalizer: Z, an fp32 value.
        top_k_ids: (K,) int32, by (logit descending, id ascending).
        top_k_logits: (K,) float32.
        top_k_weights: (K,) float32, exp((logit - max) * inverse temperature).
    """

    vocab_size: int
    argmax_id: int = -1
    max_logit: float = 0.0
    quantile_id: int = -1
    normalizer: float = 0.0
    top_k_ids: I32 | None = None
    top_k_logits: F32 | None = None
    top_k_weights: F32 | None = None


def weights(logits: F32, inverse_temperature: float) -> F32:
    """Return exp((logit - max) * inverse temperature) of finite (V,) logits, (V,) fp32."""
    with np.errstate(over="ignore"):  # an infinite distance from the maximum weighs nothing
        x = (logits - logits.max()) * np.float32(inverse_temperature)
    return x1_exp(x)


def total_order(logits: F32) -> NDArray[np.intp]:
    """Return all ids by (logit descending, id ascending)."""
    return np.argsort(-logits, kind="stable")


def running_chunk_sums(row_weights: F32) -> F32:
    """Return the running fp32 sums over chunks of 1,024 ids; the last one is Z."""
    num_chunks = -(-len(row_weights) // CHUNK)
    padded = np.zeros(num_chunks * CHUNK, dtype=np.float32)
    padded[: len(row_weights)] = row_weights
    by_lane = padded.reshape(num_chunks, CHUNK // LANES, LANES)
    lanes = by_lane[:, 0, :].copy()
    for i in range(1, CHUNK // LANES):
        lanes += by_lane[:, i, :]
    width = LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
        width //= 2
    return np.add.accumulate(lanes[:, 0], dtype=np.float32)


def quantile_token(row_weights: F32, u: float) -> int:
    """Return the token at quantile u in [0, 1) of (V,) weights, of which the largest is 1."""
    sums = running_chunk_sums(row_weights)
    target = np.float32(u) * sums[-1]
    chunk = int(np.argmax(sums > target))
    if not sums[chunk] > target:
        return int(np.flatnonzero(row_weights)[-1])
    start = chunk * CHUNK
    here = row_weights[start : start + CHUNK]
    before = sums[chunk - 1] if chunk else np.float32(0)
    running = np.add.accumulate(np.concatenate(([before], here)), dtype=np.float32)[1:]
    passing = np.flatnonzero(running > target)
    return start + int(passing[0] if len(passing) else np.flatnonzero(here)[-1])


def row_statistics(
    logits: F32, *, inverse_temperature: float = 1.0, u: float = 0.0, top_k: int = 0
) -> RowStatistics:
    """Return all statistics of one row.

    Args:
        logits: (V,) float32, finite, edits applied.
        inverse_temperature: An fp32 value above 0.
        u: Quantile in [0, 1), an fp32 value.
        top_k: Entries of the top-K arrays; more than V gives V.
    """
    row_weights = weights(logits, inverse_temperature)
    order = total_order(logits)[:top_k]
    return RowStatistics(
        vocab_size=len(logits),
        argmax_id=int(np.argmax(logits)),
        max_logit=float(logits.max()),
        quantile_id=quantile_token(row_weights, u),
        normalizer=float(running_chunk_sums(row_weights)[-1]),
        top_k_ids=order.astype(np.int32),
        top_k_logits=logits[order],
        top_k_weights=row_weights[order],
    )
