"""Tile sizes of the linear kernels. They never change a bit of a result."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from isobatch_kernels.cuda.device import Chip

SLICES: Final = 8  # of K
ROW_TOPS: Final = (2, 4, 8, 16, 32, 64, 128)
FEW_ROWS: Final = 64  # linear_rows takes so many of every matrix
MOST_ROWS: Final = ROW_TOPS[-1]  # and so many where linear_tiles would leave the chip idle
_ROW_PARTS: Final = 4  # kRowParts of a block with one slice
_REGISTERS: Final = 65536  # of a multiprocessor
_MOST_WARPS: Final = 24  # of a block
_MOST_RESIDENT: Final = 40  # warps of a multiprocessor
_RINGS: Final = (  # deep, stages
    *((1, 4), (1, 8), (1, 12), (2, 2), (2, 3), (2, 4), (2, 6)),
    *((3, 3), (3, 4), (4, 2), (4, 3), (4, 4), (7, 2), (7, 3)),
)
_OF_A_KIND: Final = 3
_CANDIDATES: Final = 24
_VARIANTS: Final = 6
# A model of one multiprocessor, to choose what is worth timing: bytes and cycles of a microsecond,
# bytes that must be on their way, and what one instruction of a warp takes of it.
_FROM_MEMORY: Final = 31e3
_FROM_CACHE: Final = 50e3
_FLIGHT: Final = 48e3
_INSTRUCTIONS: Final = 4 * 1700 * 0.5


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

    @property
    def sub_blocks(self) -> int:
        """Records of a tile."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """A `Packed` of its own."""

    tiles: int
    record_words: int
    sub_block: int
    sub_blocks: int


@dataclass(frozen=True, slots=True)
class RowsShape:
    """A launch of linear_rows."""

    nt: int  # tiles of outputs of a warp
    mt: int  # tiles of 8 rows of a block
    held: int  # rows of a tile that have room in shared memory
    slices: int  # of a block
    cluster: int  # blocks that have all slices together; 1 also where sums go through memory
    teams: int  # groups of tiles that a block has at a time
    sets: int  # of sums that a block has room for: 1 for one group of tiles of each team, or 2
    deep: int  # records of a stage, of each tile
    stages: int
    resident: int  # blocks of a multiprocessor that registers must suffice for
    blocks: tuple[int, int, int]
    shared_memory: int  # bytes

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.slices * self.teams

    @property
    def is_joined(self) -> bool:
        """Whether slices are added in shared memory."""
        return self.slices * self.cluster == SLICES

    @property
    def set_words(self) -> int:
        """Words of a team's sums in one block."""
        sums = 2 if self.mt == 1 and self.held <= 4 else 4  # of a lane
        return SLICES * self.nt * self.mt * (32 // self.cluster) * sums


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


def _most_sub_blocks(slices: int, sub_blocks: int) -> int:
    """The most that a block with so many slices has."""
    begins = [i * sub_blocks // SLICES for i in range(0, SLICES + 1, slices)]
    return max(b - a for a, b in itertools.pairwise(begins))


def _row_words_of_block(shape: RowsShape, weight: Packed) -> int:
    """Words of rows and their pairs."""
    most = _most_sub_blocks(shape.slices, weight.sub_blocks)
    apart = {64: 4, 32: 16, 16: 8}[weight.sub_block]  # kApart
    words = most * weight.sub_block // 2
    # Blocks with fewer sub-blocks may need more words between rows.
    pitch = max(n + (apart - n) % 32 for n in (words, words - weight.sub_block // 2))
    return shape.mt * (shape.held * pitch + 16 * most)


def _shared_memory(shape: RowsShape, weight: Packed) -> int:
    """Barriers, the rings, sums, rows and their pairs. Bytes."""
    rings = shape.slices * shape.teams * shape.stages
    sets = shape.teams * shape.sets if shape.is_joined else 0
    barriers = rings + (_ROW_PARTS if shape.slices == 1 else 1) + sets
    words = -(-barriers * 2 // 4) * 4 + sets * shape.set_words
    words += rings * shape.deep * shape.nt * weight.record_words
    return 4 * (words + _row_words_of_block(shape, weight))


def for_rows(rows: int, weight: Packed, like: RowsShape, chip: Chip) -> RowsShape:
    """The launch for these rows with another's sizes: no more blocks than there is room for."""
    row_tiles = -(-rows // (8 * like.mt))
    groups = -(-weight.tiles // like.nt)
    at_once = chip.multiprocessors * like.slices // SLICES
    if like.cluster > 1:
        at_once = chip.clusters[like.cluster.bit_length() - 2]
    room = at_once * like.resident // row_tiles
    passes = -(-groups // (max(1, room) * like.teams))
    blocks = (row_tiles, -(-groups // (passes * like.teams)), SLICES // like.slices)
    shape = replace(like, blocks=blocks, sets=max(like.sets, min(passes, 2)))
    return replace(shape, shared_memory=_shared_memory(shape, weight))


def _microseconds(shape: RowsShape, weight: Packed, chip: Chip) -> float:
    """What the model says of a launch."""
    x, y, z = shape.blocks
    record = 4 * weight.record_words
    each = math.ceil(x * y * z / chip.multiprocessors)  # blocks of the fullest one
    passes = -(-weight.tiles // (shape.nt * shape.teams * y))
    sub_blocks = weight.sub_blocks * shape.slices / SLICES
    records = each * passes * shape.teams * shape.nt * sub_blocks
    warps = each * shape.slices * shape.teams
    flight = warps * shape.deep * (shape.stages - 1) * shape.nt * record
    memory = records * record / _FROM_MEMORY / min(1.0, flight / _FLIGHT)
    multiplies = weight.sub_block // 16
    # Loads of rows are shared by the tiles of a warp.
    tail = 6 if shape.held <= 4 else 12
    instructions = 12 + 5 * multiplies + shape.mt * (multiplies + tail + 3 / shape.nt)
    instructions += 20 / (shape.deep * shape.nt)  # what a stage takes
    compute = records * instructions / _INSTRUCTIONS / min(1.0, warps / 12)
    rows = each * 4 * _row_words_of_block(shape, weight) / _FROM_CACHE
    sums = x * weight.tiles * SLICES * 16 * 8 * shape.mt * 4 / chip.multiprocessors
    if not shape.is_joined:
        joins = 2 + 8 * sums / _FROM_CACHE
    elif shape.cluster > 1:
        joins = 0.5 + sums / _FROM_CACHE
    else:
        joins = 0.0
    return max(memory, compute) + rows + joins + 0.1 * passes


def _registers(shape: RowsShape, weight: Packed) -> int:
    """About as many as a thread needs."""
    return 40 + shape.nt * (weight.sub_block // 8 + 4 + 8 * shape.mt)


def all_rows_shapes(rows: int, weight: Packed, chip: Chip) -> Iterator[RowsShape]:
    """Every launch that the chip can hold."""
    tiles, longest = -(-rows // 8), _most_sub_blocks(1, weight.sub_blocks)
    rings = [(deep, stages) for deep, stages in _RINGS if deep <= longest]
    clusters = [size for size, have in zip((2, 4, 8), chip.clusters, strict=True) if have]
    shares = [(SLICES, 1), *((SLICES // size, size) for size in clusters)]
    if not clusters:
        shares += [(slices, 1) for slices in (1, 2, 4)]
    for mt in {1: (1,), 2: (2,), 3: (2, 4), 4: (2, 4)}.get(tiles, (2, 4, 8)):
        held = 8 if mt > 1 else next(n for n in (2, 4, 8) if rows <= n)
        for nt, (slices, cluster), (deep, stages), resident in itertools.product(
            (1, 2), shares, rings, (1, 2, 3, 4)
        ):
            for teams in range(1, _MOST_WARPS // slices + 1):
                sizes = (nt, mt, held, slices, cluster, teams, 1, deep, stages, resident)
                shape = for_rows(rows, weight, RowsShape(*sizes, (1, 1, 1), 0), chip)
                if _can_run(shape, weight, chip):
                    yield shape


def _can_run(shape: RowsShape, weight: Packed, chip: Chip) -> bool:
    warps = shape.slices * shape.teams
    if warps < 4 or (shape.teams > 1 and shape.blocks[1] == 1):
        return False
    if warps * shape.resident > _MOST_RESIDENT:
        return False
    limit = min(255, _REGISTERS // (shape.threads * shape.resident) // 8 * 8)
    if _registers(shape, weight) > limit:
        return False
    # A block takes 1 KiB of its own, and kernels may have small arrays.
    return shape.resident * (shape.shared_memory + 1024) <= chip.shared_memory + 1024 - 256


@functools.cache
def _ranked(rows: int, weight: Sizes, chip: Chip) -> tuple[RowsShape, ...]:
    """Every launch that the chip can hold, the best by the model first."""
    shapes = set(all_rows_shapes(rows, weight, chip))
    return tuple(
        sorted(shapes, key=lambda shape: (_microseconds(shape, weight, chip), repr(shape)))
    )


def _body(shape: RowsShape) -> tuple[int, ...]:
    """All but the ring."""
    return (shape.nt, shape.mt, shape.slices, shape.cluster, shape.teams, shape.resident)


def rows_candidates(rows: int, weight: Sizes, chip: Chip) -> tuple[RowsShape, ...]:
    """Launches worth timing, the best by the model first: some of every kind, with one ring."""
    chosen: dict[tuple[int, ...], tuple[int, RowsShape]] = {}
    kinds: Counter[tuple[int, ...]] = Counter()
    for shape in _ranked(rows, weight, chip):
        kind = _body(shape)[:4]
        if _body(shape) not in chosen and kinds[kind] < _OF_A_KIND:
            chosen[_body(shape)] = kinds[kind], shape
            kinds[kind] += 1
    # The model knows better which of a kind is good than which kind: the best of each come first.
    in_turn = sorted(chosen.values(), key=lambda place_and_shape: place_and_shape[0])
    return tuple(shape for _, shape in in_turn[:_CANDIDATES])


def ring_variants(rows: int, weight: Sizes, chip: Chip, like: RowsShape) -> tuple[RowsShape, ...]:
    """The same launch with other rings."""
    others = (s for s in _ranked(rows, weight, chip) if _body(s) == _body(like) and s != like)
    return tuple(itertools.islice(others, _VARIANTS))


def takes_rows(rows: int, weight: Packed, chip: Chip) -> bool:
    """Whether linear_rows is for so many rows of a matrix, and linear_tiles for more.

    With up to two blocks of linear_tiles for a multiprocessor, linear_rows is faster up to
    `MOST_ROWS`: it cuts K too, so that matrices with few outputs fill the chip.
    """
    few = _small_tiles(MOST_ROWS, weight) <= 2 * chip.multiprocessors
    return rows <= FEW_ROWS or (rows <= MOST_ROWS and few)


def rows_top(rows: int) -> int:
    """The largest number of rows that shares a compiled kernel, and so its sizes, with `rows`."""
    return next(top for top in ROW_TOPS if rows <= top)


def choose_rows(rows: int, weight: Packed, chip: Chip) -> RowsShape | None:
    """The launch of linear_rows for few rows, as the model has it; None where rows have no room."""
    sizes = Sizes(weight.tiles, weight.record_words, weight.sub_block, weight.sub_blocks)
    candidates = rows_candidates(rows_top(rows), sizes, chip)
    return for_rows(rows, sizes, candidates[0], chip) if candidates else None


def _row_words(weight: Packed) -> int:
    """Words of a row's sub-block in linear_tiles' shared memory."""
    return 36 if weight.sub_block == 64 else weight.sub_block // 2


def _small_tiles(rows: int, weight: Packed) -> int:
    """Blocks of linear_tiles with its smallest tiles."""
    return -(-rows // 32) * -(-weight.tiles // 8)


def choose_tiles(rows: int, weight: Packed, chip: Chip) -> TilesShape:
    """The launch of linear_tiles: small tiles where larger ones would leave the chip idle."""
    if _small_tiles(rows, weight) <= 2 * chip.multiprocessors:
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
