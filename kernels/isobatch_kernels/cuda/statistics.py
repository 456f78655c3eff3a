"""Launches the statistics of wanted positions and reads what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from isobatch_kernels.cuda.launch import Launcher
from isobatch_kernels.step import Float32, Int32, Stat, StepInput

_CHUNK: Final = 1024  # ids


@dataclass(frozen=True, slots=True)
class StatisticsShape:
    """What of a step's statistics decides which kernels run, and their sizes."""

    wanted: int
    edits: int
    sums: bool  # some position wants the normaliser or a quantile
    stride: int  # the largest K, 0 for none


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsArrays:
    """A step's wishes on the device."""

    inverse_temperatures: mx.array
    quantiles: mx.array
    counts: mx.array
    edit_starts: mx.array
    edit_ids: mx.array
    edit_values: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """Entries of all rows one after the other."""

    starts: Int32
    ids: Int32
    logits: Float32
    weights: Float32


def shape_of(step: StepInput) -> StatisticsShape:
    """Sizes of a step's statistics."""
    asked = step.statistics
    top = step.top_k[(asked & Stat.TOP_K) != 0]
    return StatisticsShape(
        wanted=len(step.wanted),
        edits=len(step.edit_ids),
        sums=bool((asked & (Stat.NORMALIZER | Stat.QUANTILE)).any()),
        stride=int(top.max()) if len(top) else 0,
    )


def launch_statistics(
    launcher: Launcher, logits: mx.array, shape: StatisticsShape, arrays: StatisticsArrays
) -> tuple[mx.array, list[mx.array]]:
    """Edits logits in place; gives answers (L, 4) and, where asked, the top-K arrays."""
    rows, vocabulary = logits.shape
    chunks = -(-vocabulary // _CHUNK)
    edited = launcher.number(1)
    if shape.edits:
        edited = launcher.run(
            "apply_edits",
            [logits, arrays.edit_starts, arrays.edit_ids, arrays.edit_values],
            [((rows,), mx.int32)],
            (rows, 1, 1),
            threads=32,
        )[0]
    maxima, ids = launcher.run(
        "chunk_maxima",
        [logits, edited],
        [((rows, chunks), mx.float32), ((rows, chunks), mx.int32)],
        (chunks, rows, 1),
    )
    sums = launcher.number(rows, chunks)
    if shape.sums:
        sums = launcher.run(
            "chunk_sums",
            [logits, maxima, ids, arrays.inverse_temperatures],
            [((rows, chunks), mx.float32)],
            (chunks, rows, 1),
        )[0]
    answers = launcher.run(
        "finish_statistics",
        [logits, maxima, ids, sums, arrays.inverse_temperatures, arrays.quantiles],
        [((rows, 4), mx.int32)],
        (rows, 1, 1),
    )[0]
    if not shape.stride:
        return answers, []
    size = (rows, shape.stride)
    top = launcher.run(
        "top_k",
        [
            *(logits, maxima, ids, arrays.inverse_temperatures, arrays.counts),
            launcher.number(shape.stride),
        ],
        [(size, mx.int32), (size, mx.float32), (size, mx.float32)],
        (rows, 1, 1),
        threads=1024,
    )
    return answers, top


def read_top_k(step: StepInput, arrays: list[mx.array]) -> TopK:
    """Puts the entries of each row in order: logit descending, then id ascending."""
    asked = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0)
    starts = np.zeros(len(asked) + 1, dtype=np.int32)
    np.cumsum(asked, out=starts[1:])
    total = int(starts[-1])
    ids = np.full(total, -1, dtype=np.int32)
    logits = np.full(total, -np.inf, dtype=np.float32)
    weights = np.zeros(total, dtype=np.float32)
    if not arrays:
        return TopK(starts, ids, logits, weights)
    all_ids, all_logits, all_weights = (np.array(array) for array in arrays)
    for row, count in enumerate(asked):
        begin = starts[row]
        order = np.lexsort((all_ids[row, :count], -all_logits[row, :count]))
        for to, values in ((ids, all_ids), (logits, all_logits), (weights, all_weights)):
            to[begin : begin + count] = values[row, :count][order]
    return TopK(starts, ids, logits, weights)
