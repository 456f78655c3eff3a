"""Launches the statistics of wanted positions and reads what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from isobatch_kernels.cuda.launch import Launcher, Rows
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.step_arrays import StepShape
from isobatch_kernels.step import Float32, Int32, Stat, StepInput

_CHUNK: Final = 1024  # ids
_WORD: Final = 4  # bytes


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where results lie, in words, in the array that the host reads."""

    flags: int
    answers: int
    top: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """Entries of all rows one after the other."""

    starts: Int32
    ids: Int32
    logits: Float32
    weights: Float32


def result_layout(shape: StepShape) -> ResultLayout:
    """Flags of tokens and of wanted positions, answers (L, 4), then the three top-K arrays."""
    answers = shape.tokens + shape.wanted
    top = answers + 4 * shape.wanted
    return ResultLayout(0, answers, top, top + 3 * shape.wanted * shape.stride)


def launch_statistics(
    launcher: Launcher,
    scratch: Scratch,
    logits: Rows,
    shape: StepShape,
    numbers: dict[str, int],
    results: int,
    chosen: int,
) -> None:
    """Edits logits in place, then writes answers, chosen tokens and, where asked, the top K.

    `numbers` has the addresses of the step's arrays.
    """
    rows, vocabulary = logits.rows, logits.width
    chunks = -(-vocabulary // _CHUNK)
    layout = result_layout(shape)
    maxima, ids, sums = (
        scratch.get(f"chunk {name}", rows * chunks * _WORD) for name in ("maxima", "ids", "sums")
    )
    if shape.edits:
        edits = [numbers[name] for name in ("edit_starts", "edit_ids", "edit_values")]
        arguments = [logits.address, *edits, vocabulary]
        launcher.run("apply_edits", (rows, 1, 1), arguments, threads=32)
    launcher.run("chunk_maxima", (chunks, rows, 1), [logits.address, maxima, ids, vocabulary])
    temperatures = numbers["inverse_temperatures"]
    if shape.sums:
        launcher.run(
            "chunk_sums",
            (chunks, rows, 1),
            [logits.address, maxima, ids, temperatures, sums, vocabulary],
        )
    launcher.run(
        "finish_statistics",
        (rows, 1, 1),
        [
            *(logits.address, maxima, ids, sums if shape.sums else 0, temperatures),
            *(numbers["quantiles"], numbers["by_quantile"]),
            *(results + _WORD * layout.answers, chosen, vocabulary, chunks),
        ],
    )
    if shape.stride:
        top = [results + _WORD * (layout.top + i * rows * shape.stride) for i in range(3)]
        launcher.run(
            "top_k",
            (rows, 1, 1),
            [
                *(logits.address, maxima, temperatures, numbers["top_counts"]),
                *(*top, vocabulary, chunks, shape.stride),
            ],
            threads=1024,
        )


def read_top_k(step: StepInput, words: Int32, stride: int) -> TopK:
    """Puts the entries of each row in order: logit descending, then id ascending.

    `words`: ids, logits and weights, (L, stride) each.
    """
    asked = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0)
    starts = np.zeros(len(asked) + 1, dtype=np.int32)
    np.cumsum(asked, out=starts[1:])
    total = int(starts[-1])
    ids = np.full(total, -1, dtype=np.int32)
    logits = np.full(total, -np.inf, dtype=np.float32)
    weights = np.zeros(total, dtype=np.float32)
    if not stride:
        return TopK(starts, ids, logits, weights)
    all_ids, *floats = words.reshape(3, len(asked), stride)
    all_logits, all_weights = (array.view(np.float32) for array in floats)
    for row, count in enumerate(asked):
        begin = starts[row]
        order = np.lexsort((all_ids[row, :count], -all_logits[row, :count]))
        for to, values in ((ids, all_ids), (logits, all_logits), (weights, all_weights)):
            to[begin : begin + count] = values[row, :count][order]
    return TopK(starts, ids, logits, weights)
