"""Row statistics on the device (statistics.metal, top_k.metal) and their order on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.metal.launch import GROUP, MINIMUM
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    import numpy.typing as npt

    from isobatch_kernels.metal.arrays import LibraryArray
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.step import Float32, Int32, StepInput

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class RowResults:
    """Statistics as `step.StepOutput` has them."""

    logits: Float32
    argmax_ids: Int32
    max_logits: Float32
    normalizers: Float32
    quantile_ids: Int32
    top_k_starts: Int32
    top_k_ids: Int32
    top_k_logits: Float32
    top_k_weights: Float32


def empty_results(wanted: int) -> RowResults:
    """Results where nothing was computed."""
    floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int32)
    return RowResults(
        logits=np.zeros((0, 0), np.float32),
        argmax_ids=np.zeros(wanted, np.int32),
        max_logits=np.zeros(wanted, np.float32),
        normalizers=np.zeros(wanted, np.float32),
        quantile_ids=np.full(wanted, -1, np.int32),
        top_k_starts=np.zeros(wanted + 1, np.int32),
        top_k_ids=ints,
        top_k_logits=floats,
        top_k_weights=floats,
    )


def row_statistics(
    launcher: Launcher, logits: LibraryArray, width: int, step: StepInput
) -> RowResults:
    """Edits, then every statistic that some row asks for.

    Args:
        launcher: runs the kernels.
        logits: (L, width) float32 before edits.
        width: vocabulary size.
        step: edits and what is asked.
    """
    rows = len(step.wanted)
    chunks = -(-width // _CHUNK)
    sizes = launcher.numbers(width, chunks)
    if len(step.edit_ids):
        edits = [launcher.upload(a) for a in (step.edit_starts, step.edit_ids, step.edit_values)]
        grid = (-(-width // GROUP), rows, 1)
        output = [((rows, width), "float32")]
        logits = launcher.run("apply_edits", [logits, *edits, sizes], output, grid)[0]
    per_chunk = (max(MINIMUM, rows * chunks),)
    per_row = (max(MINIMUM, rows),)
    maxima = launcher.run(
        "chunk_maxima",
        [logits, sizes],
        [(per_chunk, "float32"), (per_chunk, "int32")],
        (1, chunks, rows),
    )
    largest, argmax = launcher.run(
        "row_maximum",
        [*maxima, sizes],
        [(per_row, "float32"), (per_row, "int32")],
        (1, rows, 1),
        threads=32,
    )
    temperatures = launcher.upload(step.inverse_temperatures)
    numpy = launcher.arrays.numpy
    wants_sum = (step.statistics & Stat.NORMALIZER) != 0
    wants_quantile = (step.statistics & Stat.QUANTILE) != 0
    normalizers = np.zeros(rows, np.float32)
    quantile_ids = np.full(rows, -1, np.int32)
    if (wants_sum | wants_quantile).any():
        (sums,) = launcher.run(
            "chunk_sums",
            [logits, largest, temperatures, sizes],
            [(per_chunk, "float32")],
            (1, chunks, rows),
        )
        z, ids = launcher.run(
            "quantile",
            [logits, largest, temperatures, sums, launcher.upload(step.quantiles), sizes],
            [(per_row, "float32"), (per_row, "int32")],
            (1, rows, 1),
        )
        normalizers[wants_sum] = numpy(z)[:rows][wants_sum]
        quantile_ids[wants_quantile] = numpy(ids)[:rows][wants_quantile]
    starts, top = _top_k(launcher, logits, largest, temperatures, width, step)
    return RowResults(
        logits=numpy(logits),
        argmax_ids=numpy(argmax)[:rows],
        max_logits=numpy(largest)[:rows],
        normalizers=normalizers,
        quantile_ids=quantile_ids,
        top_k_starts=starts,
        top_k_ids=top[0],
        top_k_logits=top[1],
        top_k_weights=top[2],
    )


def _top_k(
    launcher: Launcher,
    logits: LibraryArray,
    largest: LibraryArray,
    temperatures: LibraryArray,
    width: int,
    step: StepInput,
) -> tuple[Int32, tuple[Int32, Float32, Float32]]:
    """The kernel finds each row's K entries; the host puts them in order."""
    rows = len(step.wanted)
    counts = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0).astype(np.int32)
    starts: npt.NDArray[np.int32] = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    ids = np.full(total, -1, np.int32)
    values = np.full(total, -np.inf, np.float32)
    weights = np.zeros(total, np.float32)
    if total == 0:
        return starts, (ids, values, weights)
    stride = max(MINIMUM, int(counts.max()))
    shape = (rows, stride)
    outputs = launcher.run(
        "top_k",
        [logits, largest, temperatures, launcher.upload(counts), launcher.numbers(width, stride)],
        [(shape, "int32"), (shape, "float32"), (shape, "float32")],
        (1, rows, 1),
    )
    found_ids, found_logits, found_weights = (launcher.arrays.numpy(a) for a in outputs)
    for row, count in enumerate(counts.tolist()):
        kept = min(count, width)
        order = np.lexsort((found_ids[row, :kept], -found_logits[row, :kept]))
        at = slice(int(starts[row]), int(starts[row]) + kept)
        ids[at] = found_ids[row, order]
        values[at] = found_logits[row, order]
        weights[at] = found_weights[row, order]
    return starts, (ids, values, weights)
