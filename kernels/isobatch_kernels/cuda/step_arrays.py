"""Cuts a step into the numbers that the launches take, all sent to the device as one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.scratch import power_of_two
from isobatch_kernels.step import Int32, Stat, StepInput

PART: Final = 64  # tokens of a part of attention
LONG_ROW: Final = 8  # rows from this many tokens on are parts; the tokens of others stand alone
_CHUNK: Final = 256
_NONE: Final = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """All sizes of a step: what its launches depend on."""

    tokens: int
    sequences: int
    table_width: int
    singles: int  # tokens whose attention is cut into chunks
    parts: int
    chunks: int
    wanted: int
    edits: int  # room for edits, a power of two; 0 for none
    sums: bool  # some position wants the normaliser or a quantile
    stride: int  # room for the top K of a position, a power of two; 0 for none
    sourced: bool  # some token is one that the step before chose


# The arrays of a step in order, with what each has as many numbers as.
_PIECES: Final = (
    *(("token_ids", "tokens"), ("positions", "tokens"), ("rows", "tokens"), ("blocks", "tokens")),
    *(("tables", "tables"), ("singles", "singles"), ("single_positions", "singles")),
    *(("single_rows", "singles"), ("begins", "parts"), ("counts", "parts")),
    *(("wanted", "wanted"), ("top_counts", "wanted"), ("edit_starts", "starts")),
    *(("by_quantile", "wanted"), ("inverse_temperatures", "wanted"), ("quantiles", "wanted")),
    *(("edit_ids", "edits"), ("edit_values", "edits"), ("sources", "sources")),
)


def offsets(shape: StepShape) -> dict[str, int]:
    """Where each array of a step begins, in numbers; `end` is their count."""
    sizes = {
        "tokens": shape.tokens,
        "tables": shape.sequences * shape.table_width,
        "singles": shape.singles,
        "parts": shape.parts,
        "wanted": shape.wanted,
        "starts": shape.wanted + 1,
        "edits": shape.edits,
        "sources": shape.tokens if shape.sourced else 0,
    }
    begins, at = {}, 0
    for name, size in _PIECES:
        begins[name] = at
        at += sizes[size]
    return {**begins, "end": at}


def describe(step: StepInput, block_size: int) -> tuple[StepShape, Int32]:
    """The sizes of a step and its numbers in one array (floats as bits)."""
    starts = np.asarray(step.query_start_loc, dtype=np.int32)
    lengths = np.diff(starts)
    positions = np.ascontiguousarray(step.positions, dtype=np.int32)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    width = power_of_two(int(positions.max()) // block_size + 1)
    tables = np.zeros((len(lengths), width), dtype=np.int32)
    known = min(width, step.block_tables.shape[1])
    tables[:, :known] = np.maximum(step.block_tables[:, :known], 0)
    blocks = tables[rows, positions // block_size]
    long = lengths >= LONG_ROW
    singles = np.flatnonzero(~long[rows]).astype(np.int32)
    parts, counts = _parts(starts, long)
    reach = int(positions[singles].max()) if len(singles) else 0
    asked = np.where((step.statistics & Stat.TOP_K) != 0, step.top_k, 0)
    edits = len(step.edit_ids)
    sources = step.token_sources if (step.token_sources >= 0).any() else _NONE
    shape = StepShape(
        tokens=len(rows),
        sequences=len(lengths),
        table_width=width,
        singles=len(singles),
        parts=len(parts),
        chunks=power_of_two(reach // _CHUNK + 1),
        wanted=len(step.wanted),
        edits=power_of_two(edits) if edits else 0,
        sums=bool((step.statistics & (Stat.NORMALIZER | Stat.QUANTILE)).any()),
        stride=power_of_two(int(asked.max())) if asked.any() else 0,
        sourced=len(sources) > 0,
    )
    padding = np.zeros(shape.edits - edits, dtype=np.int32)
    pieces = (
        *(step.token_ids, positions, rows, blocks, tables.reshape(-1)),
        *(singles, positions[singles], rows[singles], parts, counts),
        *(step.wanted, asked, step.edit_starts),
        (step.statistics & Stat.QUANTILE) != 0,
        *(_bits(step.inverse_temperatures), _bits(step.quantiles)),
        *(step.edit_ids, padding, _bits(step.edit_values), padding, sources),
    )
    return shape, np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces])


def _parts(starts: Int32, long: npt.NDArray[np.bool_]) -> tuple[Int32, Int32]:
    """First token and number of tokens of every part."""
    begins = [
        np.arange(start, end, PART, dtype=np.int32)
        for start, end in zip(starts[:-1][long], starts[1:][long], strict=True)
    ]
    if not begins:
        return _NONE, _NONE
    ends = [
        np.minimum(begin + PART, end) for begin, end in zip(begins, starts[1:][long], strict=True)
    ]
    parts = np.concatenate(begins)
    return parts, np.concatenate(ends) - parts


def _bits(values: npt.NDArray[Any]) -> Int32:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
