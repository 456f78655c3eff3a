"""Tile sizes of the linear kernels. They never change a bit of a result."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Protocol

from isobatch_kernels.cuda.device import Chip

_FLIGHT: Final = 40_000  # bytes on their way that one multiprocessor needs
# (nt, mt) -> blocks of linear_rows that registers allow at once
_RESIDENT: Final = {(1, 1): 4, (2, 1): 4, (4, 1): 2, (1, 2): 2, (2, 2): 2, (4, 2): 1}
_RESERVED: Final = 256  # bytes of shared memory to spare
ROW_TOPS: Final = (2, 4, 8, 16, 32)


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
    deep: int  # sub-blocks of a stage
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class TilesShape:
    """A launch of linear_tiles."""

    warp_tiles: int  # of 16 outputs
    parts: int  # of 32 rows
    stages: int
    blocks: tuple[int, int, int]
    shared_memory: int  # bytes

    @property
    def threads(self) -> int:
        """Of a block."""
        return 256 // self.warp_tiles * self.parts


def _row_words(weight: Packed) -> int:
    """Words of a row's sub-block in shared memory."""
    return 36 if weight.sub_block == 64 else weight.sub_block // 2


def rows_shape(
    rows: int, weight: Packed, nt: int, deep: int, stages: int, mt: int = 0
) -> RowsShape:
    """A launch with given sizes; mt 0: 1 for up to 8 rows, else 2."""
    mt = mt or (1 if rows <= 8 else 2)
    held = 2 if rows <= 2 else 4 if rows <= 4 else 8 * mt
    sub_block = nt * weight.record_words + 16 * mt + held * _row_words(weight)
    sums = 8 * mt * 8 * (nt * 16 + 4)
    blocks = (-(-rows // (8 * mt)), -(-weight.tiles // nt), 1)
    memory = 4 * (8 * stages * deep * sub_block + sums)
    return RowsShape(nt, mt, held, deep, stages, blocks, memory)


def _score(shape: RowsShape, weight: Packed, chip: Chip) -> float:
    """How well a launch fills the chip: the share of time in which multiprocessors have work.

    They take blocks in waves, as many at once as registers and shared memory allow.
    """
    at_once = min(_RESIDENT[shape.nt, shape.mt], chip.shared_memory // (shape.shared_memory + 1024))
    if at_once == 0:
        return 0.0
    each = shape.blocks[0] * shape.blocks[1] / chip.multiprocessors
    whole = max(1, math.ceil(each))
    waves = whole if whole <= at_once else math.ceil(whole / at_once) * at_once
    # Blocks that begin early fill the multiprocessors that are free first: where all could have
    # one block, none should have room for two.
    crowded = 0.8 if at_once > whole else 1.0
    at_once = min(at_once, whole)
    flight = at_once * 8 * shape.deep * (shape.stages - 1) * shape.nt * weight.record_words * 4
    # Few tiles in a block mean more of its time for what is the same for every block.
    fixed = {1: 0.75, 2: 0.9, 4: 1.0}[shape.nt]
    return each / waves * min(1.0, flight / _FLIGHT) * fixed * crowded


def rows_top(rows: int) -> int:
    """The largest number of rows that shares a compiled kernel, and so its sizes, with `rows`."""
    return next(top for top in ROW_TOPS if rows <= top)


@functools.cache
def rows_candidates(rows: int, weight: Sizes, chip: Chip) -> tuple[RowsShape, ...]:
    """Launches worth timing: the deepest rings that leave room for one to four blocks."""
    shapes = []
    for nt in (4, 2, 1):
        for deep in (1, 2):
            one = rows_shape(rows, weight, nt, deep, 1)
            stage = rows_shape(rows, weight, nt, deep, 2).shared_memory - one.shared_memory
            for at_once in range(1, _RESIDENT[nt, one.mt] + 1):
                room = (chip.shared_memory + 1024) // at_once - 1024 - _RESERVED
                stages = min(12, 1 + (room - one.shared_memory) // stage)
                if stages >= 2:
                    shapes.append(rows_shape(rows, weight, nt, deep, stages))
    return tuple(dict.fromkeys(shapes))


@functools.cache
def _best_rows(rows: int, weight: Sizes, chip: Chip) -> RowsShape:
    return max(rows_candidates(rows, weight, chip), key=lambda shape: _score(shape, weight, chip))


def choose_rows(rows: int, weight: Packed, chip: Chip) -> RowsShape:
    """The launch of linear_rows for up to 32 rows, as a model of the chip has it."""
    sizes = Sizes(weight.tiles, weight.record_words, weight.sub_block)
    return for_rows(rows, sizes, _best_rows(rows_top(rows), sizes, chip))


def for_rows(rows: int, weight: Packed, like: RowsShape) -> RowsShape:
    """The launch for these rows with another's sizes."""
    return rows_shape(rows, weight, like.nt, like.deep, like.stages, like.mt)


def choose_tiles(rows: int, weight: Packed, chip: Chip) -> TilesShape:
    """The launch of linear_tiles: small tiles where larger ones would leave the chip idle."""
    blocks = -(-rows // 32) * -(-weight.tiles // 8)
    if blocks <= 2 * chip.multiprocessors:
        return tiles_shape(rows, weight, 1, 1, 4, chip)
    return tiles_shape(rows, weight, 2, 1 if rows <= 128 else 2, 4, chip)


def tiles_shape(
    rows: int, weight: Packed, warp_tiles: int, parts: int, stages: int, chip: Chip
) -> TilesShape:
    """A launch with given sizes; fewer stages where shared memory ends."""
    stage = 8 * weight.record_words + 32 * parts * (_row_words(weight) + 2)
    totals = 32 * 128 * parts
    stages = min(stages, (chip.shared_memory - 1024 - 4 * totals) // (4 * stage))
    blocks = (-(-rows // (32 * parts)), -(-weight.tiles // 8), 1)
    return TilesShape(warp_tiles, parts, stages, blocks, 4 * (stage * stages + totals))


def choose_share(group: int, blocks: int, chip: Chip) -> int:
    """Query heads of a block of attention_chunks, where `blocks` have all `group` of a head.

    Blocks with few heads read keys and values again; where there are few blocks, they end sooner.
    """
    for share in (1, 2, 4):
        if share < group and blocks * -(-group // share) <= 3 * chip.multiprocessors:
            return share
    return group
