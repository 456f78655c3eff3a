"""Row statistics on the device (statistics.metal, top_k.metal) and their order on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.metal.launch import GROUP, MINIMUM
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from isobatch_kernels.metal.arrays import ArrayLibrary, LibraryArray
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


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Statistics of a step on the device, computed or on their way."""

    logits: LibraryArray  # (L, width) after edits
    argmax: LibraryArray  # (L,)
    largest: LibraryArray  # (L,)
    sampled: Sequence[LibraryArray]  # normalisers and quantile ids (L,), or nothing
    found: Sequence[LibraryArray]  # ids, logits and weights of the largest (L, stride), or nothing
    counts: Int32  # (L,) K of each row
    width: int
    step: StepInput

    def arrays(self) -> list[LibraryArray]:
        """All of them."""
        return [self.logits, self.argmax, self.largest, *self.sampled, *self.found]

    def tokens_alone(self) -> DeviceStatistics:
        """What `take_tokens` needs; holds no row of logits."""
        return replace(self, logits=self.argmax, largest=self.argmax, found=())


def row_statistics(
    launcher: Launcher, logits: LibraryArray, width: int, step: StepInput
) -> DeviceStatistics:
    """Enqueues edits, then every statistic that some row asks for.

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
    sampled: list[LibraryArray] = []
    if (step.statistics & (Stat.NORMALIZER | Stat.QUANTILE)).any():
        (sums,) = launcher.run(
            "chunk_sums",
            [logits, largest, temperatures, sizes],
            [(per_chunk, "float32")],
            (1, chunks, rows),
        )
        sampled = launcher.run(
            "quantile",
            [logits, largest, temperatures, sums, launcher.upload(step.quantiles), sizes],
            [(per_row, "float32"), (per_row, "int32")],
            (1, rows, 1),
        )
    counts = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0).astype(np.int32)
    found: list[LibraryArray] = []
    if counts.any():
        stride = max(MINIMUM, int(counts.max()))
        shape = (rows, stride)
        wanted = launcher.upload(counts)
        found = launcher.run(
            "top_k",
            [logits, largest, temperatures, wanted, launcher.numbers(width, stride)],
            [(shape, "int32"), (shape, "float32"), (shape, "float32")],
            (1, rows, 1),
        )
    return DeviceStatistics(logits, argmax, largest, sampled, found, counts, width, step)


def read_statistics(arrays: ArrayLibrary, found: DeviceStatistics) -> RowResults:
    """Waits for statistics and gives them to the host."""
    numpy, step = arrays.numpy, found.step
    arrays.wait(*found.arrays())
    rows = len(step.wanted)
    normalizers = np.zeros(rows, np.float32)
    quantile_ids = np.full(rows, -1, np.int32)
    if found.sampled:
        wants_sum = (step.statistics & Stat.NORMALIZER) != 0
        wants_quantile = (step.statistics & Stat.QUANTILE) != 0
        normalizers[wants_sum] = numpy(found.sampled[0])[:rows][wants_sum]
        quantile_ids[wants_quantile] = numpy(found.sampled[1])[:rows][wants_quantile]
    top = [numpy(a) for a in found.found]
    starts, ids, values, weights = _ordered(found.counts, found.width, top)
    return RowResults(
        logits=numpy(found.logits),
        argmax_ids=numpy(found.argmax)[:rows],
        max_logits=numpy(found.largest)[:rows],
        normalizers=normalizers,
        quantile_ids=quantile_ids,
        top_k_starts=starts,
        top_k_ids=ids,
        top_k_logits=values,
        top_k_weights=weights,
    )


def take_tokens(
    launcher: Launcher, step: StepInput, before: DeviceStatistics | None, vocab_size: int
) -> LibraryArray:
    """(T,) token ids of a step, with those that the step before it chose filled in.

    Raises:
        ValueError: a source is not a wanted position of that step; nothing was written.
    """
    ids = launcher.upload(step.token_ids.astype(np.int32))
    sources = step.token_sources
    if not (sources >= 0).any():
        return ids
    tokens, known = len(step.token_ids), 0 if before is None else len(before.step.wanted)
    if before is None or len(sources) != tokens or int(sources.max()) >= known:
        raise ValueError(
            f"[step] token_sources must be one a token, below {known}, got {sources[:8]}"
        )
    draws = (before.step.statistics & Stat.QUANTILE) != 0
    inputs = [
        *(ids, launcher.upload(sources.astype(np.int32)), before.argmax),
        before.sampled[1] if before.sampled else before.argmax,
        *(launcher.upload(draws.astype(np.int32)), launcher.numbers(tokens, vocab_size)),
    ]
    output = [((max(MINIMUM, tokens),), "int32")]
    return launcher.run("take_tokens", inputs, output, (-(-tokens // GROUP), 1, 1))[0]


def _ordered(
    counts: Int32, width: int, found: list[npt.NDArray[Any]]
) -> tuple[Int32, Int32, Float32, Float32]:
    """Starts, ids, logits and weights of each row's K entries by (logit descending, id ascending).

    `found` has the entries as a set: ids, logits, weights, each (L, stride). Entries past the
    vocabulary get no id, the logit -infinity and the weight +0.
    """
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    ids = np.full(total, -1, np.int32)
    values = np.full(total, -np.inf, np.float32)
    weights = np.zeros(total, np.float32)
    for row, count in enumerate(counts.tolist()):
        kept = min(count, width)
        if kept == 0:
            continue
        row_ids, row_logits, row_weights = (part[row, :kept] for part in found)
        order = np.lexsort((row_ids, -row_logits))
        at = slice(int(starts[row]), int(starts[row]) + kept)
        ids[at], values[at], weights[at] = row_ids[order], row_logits[order], row_weights[order]
    return starts, ids, values, weights
