"""Tile sizes of the linear kernels. They never change a bit of a result."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Protocol

MULTIPROCESSORS: Final = 132  # of an H200; others run the same sizes
_SHARED_MEMORY: Final = 226 * 1024
_FLIGHT: Final = 40_000  # bytes on their way that one multiprocessor needs
# (nt, mt) -> blocks of linear_rows that registers allow at once
_RESIDENT: Final = {(1, 1): 4, (2, 1): 4, (4, 1): 2, (1, 2): 4, (2, 2): 2, (4, 2): 1}


class Packed(Protocol):
    """Sizes of a packed weight."""

    @property
    def tiles(self) -> int:
        """Tiles of 16 outputs."""
        ...

    @property
    def record_words(self) -> int:
        """32-bit words of a record."""
        ...

    @property
    def sub_block(self) -> int:
        """Inputs of a record."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """A `Packed` of its own."""

    tiles: int
    record_words: int
    sub_block: int


@dataclass(frozen=True, slots=True)
class RowsShape:
    """A launch of linear_rows."""

    nt: int  # tiles of outputs of a block
    mt: int  # tiles of 8 rows of a block
    held: int  # room for rows in shared memory, which is fixed for a compiled kernel
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class TilesShape:
    """A launch of linear_tiles."""

    parts: int  # of 32 rows
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int


def _row_words(weight: Packed) -> int:
    """Words of a row's sub-block in shared memory."""
    return 36 if weight.sub_block == 64 else weight.sub_block // 2


def rows_shape(rows: int, weight: Packed, nt: int, stages: int) -> RowsShape:
    """A launch with given sizes."""
    mt = 1 if rows <= 8 else 2
    held = 2 if rows <= 2 else 8 * mt
    stage = nt * weight.record_words + 16 * mt + held * _row_words(weight)
    sums = 8 * mt * 8 * (nt * 16 + 4)
    blocks = (-(-rows // (8 * mt)), -(-weight.tiles // nt), 1)
    return RowsShape(nt, mt, held, stages, blocks, 4 * (8 * stages * stage + sums))


def _score(shape: RowsShape, weight: Packed) -> float:
    """How well a launch fills the chip: the share of time in which multiprocessors have work.

    They take blocks in waves, as many at once as registers and shared memory allow.
    """
    at_once = min(_RESIDENT[shape.nt, shape.mt], _SHARED_MEMORY // (shape.shared_memory + 1024))
    if at_once == 0:
        return 0.0
    each = shape.blocks[0] * shape.blocks[1] / MULTIPROCESSORS
    whole = max(1, math.ceil(each))
    waves = whole if whole <= at_once else math.ceil(whole / at_once) * at_once
    at_once = min(at_once, whole)
    flight = at_once * 8 * (shape.stages - 1) * shape.nt * weight.record_words * 4
    # Few tiles in a block mean more of its time for what is the same for every block; a block
    # alone on a multiprocessor waits where another would work.
    fixed = 0.85 if shape.nt == 1 else 1.0
    alone = 0.75 if at_once == 1 and whole > 1 else 1.0
    return each / waves * min(1.0, flight / _FLIGHT) * fixed * alone


@functools.cache
def _best_rows(rows: int, weight: Packed) -> RowsShape:
    candidates = [
        rows_shape(rows, weight, nt, stages) for nt in (4, 2, 1) for stages in range(3, 9)
    ]
    return max(candidates, key=lambda shape: _score(shape, weight))


def choose_rows(rows: int, weight: Packed) -> RowsShape:
    """The launch of linear_rows for up to 32 rows."""
    sizes = Sizes(weight.tiles, weight.record_words, weight.sub_block)
    # Row counts that share a compiled kernel share its sizes.
    top = 2 if rows <= 2 else -(-rows // 8) * 8
    best = _best_rows(top, sizes)
    return rows_shape(rows, sizes, best.nt, best.stages)


def choose_tiles(rows: int, weight: Packed) -> TilesShape:
    """The launch of linear_tiles."""
    few = -(-rows // 128) * -(-weight.tiles // 8) < MULTIPROCESSORS
    parts = 2 if rows <= 64 or few else 4
    return tiles_shape(rows, weight, parts, 4)


def tiles_shape(rows: int, weight: Packed, parts: int, stages: int) -> TilesShape:
    """A launch with given sizes; fewer stages where shared memory ends."""
    stage = 8 * weight.record_words + 32 * parts * (_row_words(weight) + 2)
    totals = 32 * 128 * parts
    stages = min(stages, (_SHARED_MEMORY - 4 * totals) // (4 * stage))
    blocks = (-(-rows // (32 * parts)), -(-weight.tiles // 8), 1)
    return TilesShape(parts, stages, blocks, 4 * (stage * stages + totals))
