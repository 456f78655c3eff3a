"""Cuts a step into the arrays that the launches take, all sent to the device as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.launch import AttentionArrays
from isobatch_kernels.cuda.statistics import StatisticsArrays, StatisticsShape, shape_of
from isobatch_kernels.step import Int32, Stat, StepInput

PART: Final = 64  # tokens of a part of attention
LONG_ROW: Final = 8  # rows from this many tokens on are parts; the tokens of others stand alone
_CHUNK: Final = 256


@dataclass(frozen=True, slots=True)
class StepShape:
    """All sizes of a step: what its launches depend on."""

    tokens: int
    sequences: int
    table_width: int
    singles: int  # tokens whose attention is cut into chunks
    parts: int
    chunks: int
    statistics: StatisticsShape

    @property
    def repeats(self) -> bool:
        """Whether steps of this shape are likely to come again: every row has one token."""
        return self.parts == 0 and self.tokens == self.sequences


@dataclass(frozen=True, slots=True, eq=False)
class StepViews:
    """The arrays of one step, as views of the one that was sent."""

    token_ids: mx.array
    blocks: mx.array
    wanted: mx.array | None
    attention: AttentionArrays
    statistics: StatisticsArrays


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def describe(step: StepInput, block_size: int) -> tuple[StepShape, Int32]:
    """The sizes of a step and its numbers in one array (floats as bits)."""
    starts = np.asarray(step.query_start_loc, dtype=np.int32)
    lengths = np.diff(starts)
    positions = np.ascontiguousarray(step.positions, dtype=np.int32)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    width = _power_of_two(int(positions.max()) // block_size + 1)
    tables = np.zeros((len(lengths), width), dtype=np.int32)
    known = min(width, step.block_tables.shape[1])
    tables[:, :known] = np.maximum(step.block_tables[:, :known], 0)
    blocks = tables[rows, positions // block_size]
    long = lengths >= LONG_ROW
    singles = np.flatnonzero(~long[rows]).astype(np.int32)
    begins = [
        np.arange(start, end, PART, dtype=np.int32)
        for start, end in zip(starts[:-1][long], starts[1:][long], strict=True)
    ]
    ends = [
        np.minimum(begin + PART, end) for begin, end in zip(begins, starts[1:][long], strict=True)
    ]
    parts = np.concatenate(begins) if begins else np.zeros(0, dtype=np.int32)
    counts = np.concatenate(ends) - parts if ends else parts
    reach = int(positions[singles].max()) if len(singles) else 0
    asked = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0)
    shape = StepShape(
        tokens=len(rows),
        sequences=len(lengths),
        table_width=width,
        singles=len(singles),
        parts=len(parts),
        chunks=_power_of_two(reach // _CHUNK + 1),
        statistics=shape_of(step),
    )
    pieces = (
        *(step.token_ids, positions, rows, blocks, tables.reshape(-1)),
        *(_some(singles), _some(parts), _some(counts)),
        *(step.wanted, asked, step.edit_starts, _some(step.edit_ids)),
        _bits(step.inverse_temperatures),
        _bits(step.quantiles),
        _some(_bits(step.edit_values)),
    )
    return shape, np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces])


def _bits(values: npt.NDArray[np.float32]) -> Int32:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.int32)


def _some(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """No array on the device is empty."""
    return values if len(values) else np.zeros(1, dtype=np.int32)


def views(shape: StepShape, numbers: mx.array) -> StepViews:
    """Takes the array of `describe` apart again, on the device."""
    pieces = _pieces(shape, numbers)
    token_ids, positions, rows, blocks, tables = (next(pieces) for _ in range(5))
    singles, begins, counts = (next(pieces) for _ in range(3))
    wanted, top_counts, edit_starts, edit_ids = (next(pieces) for _ in range(4))
    temperatures, quantiles, edit_values = (next(pieces).view(mx.float32) for _ in range(3))
    return StepViews(
        token_ids=token_ids,
        blocks=blocks,
        wanted=wanted if shape.statistics.wanted else None,
        attention=AttentionArrays(
            rows=rows,
            positions=positions,
            tables=tables.reshape(shape.sequences, shape.table_width),
            tokens=singles,
            begins=begins,
            counts=counts,
            num_tokens=shape.singles,
            chunks=shape.chunks,
        ),
        statistics=StatisticsArrays(
            inverse_temperatures=temperatures,
            quantiles=quantiles,
            counts=top_counts,
            edit_starts=edit_starts,
            edit_ids=edit_ids,
            edit_values=edit_values,
        ),
    )


def _pieces(shape: StepShape, numbers: mx.array) -> Iterator[mx.array]:
    wanted, edits = shape.statistics.wanted, max(1, shape.statistics.edits)
    sizes = (
        *[shape.tokens] * 4,
        shape.sequences * shape.table_width,
        *(max(1, shape.singles), max(1, shape.parts), max(1, shape.parts)),
        *(wanted, wanted, wanted + 1, edits, wanted, wanted, edits),
    )
    begin = 0
    for size in sizes:
        yield numbers[begin : begin + size]
        begin += size
