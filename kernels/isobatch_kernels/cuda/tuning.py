"""Tile sizes of the linear kernels. They never change a bit of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

MULTIPROCESSORS: Final = 132  # of an H200; others run the same sizes
_SHARED_MEMORY: Final = 226 * 1024


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
class RowsShape:
    """A launch of linear_rows."""

    nt: int  # tiles of outputs of a block
    mt: int  # tiles of 8 rows
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class TilesShape:
    """A launch of linear_tiles."""

    mt: int
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int


def rows_shape(rows: int, weight: Packed, nt: int, stages: int, limit: int) -> RowsShape:
    """A launch with given sizes; `limit` is the most blocks that walk over the tiles."""
    mt = 1 if rows <= 8 else 2 if rows <= 16 else 4
    ring = 8 * stages * nt * weight.record_words
    sums = 8 * mt * 8 * (nt * 16 + 4)
    groups = -(-weight.tiles // nt)
    blocks = (min(groups, limit), -(-rows // (8 * mt)), 1)
    return RowsShape(nt, mt, stages, blocks, 4 * (ring + sums))


def choose_rows(rows: int, weight: Packed) -> RowsShape:
    """The launch of linear_rows for up to 32 rows."""
    if weight.tiles <= 4 * MULTIPROCESSORS:
        nt = 1 if rows <= 16 else 2
    else:
        nt = 2 if rows <= 8 else 4
    stages = {1: 8, 2: 4, 4: 3}[nt]
    return rows_shape(rows, weight, nt, stages, 1 << 30)


def choose_tiles(rows: int, weight: Packed) -> TilesShape:
    """The launch of linear_tiles."""
    mt = 2 if rows <= 64 or -(-rows // 128) * -(-weight.tiles // 8) < MULTIPROCESSORS else 4
    row_words = 36 if weight.sub_block == 64 else weight.sub_block // 2
    stage = 8 * weight.record_words + 32 * mt * (row_words + 2)
    stages = min(4, _SHARED_MEMORY // (4 * stage))
    blocks = (-(-rows // (32 * mt)), -(-weight.tiles // 8), 1)
    return TilesShape(mt, stages, blocks, 4 * stage * stages)
