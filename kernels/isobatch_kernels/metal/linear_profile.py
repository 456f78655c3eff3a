"""Which kernel and which tile take a linear layer: by row count, and by the layer's shape.

A matter of speed alone: every way gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GEMV, GEMV_MULTI, GEMM = "gemv", "gemv_multi", "gemm"
# gemv_multi whose lanes own several outputs, so that activations are read less often.
GEMV_WIDE = "gemv_wide"

Way = tuple[str, int]  # kernel, and its tile: R of gemv, V of gemv_multi or BM of gemm


def kernel_of(path: str) -> str:
    """The kernel of a path, as it is launched and counted."""
    return GEMV_MULTI if path == GEMV_WIDE else path


def wide_outputs(rows: int) -> int:
    """Outputs of a lane of gemv_wide with V rows: R, so that R*V accumulators stay in registers."""
    return 4 if rows <= 4 else 2


@dataclass(frozen=True, slots=True)
class Choice:
    """Ways of a step of so many rows: one for every layer but those whose shape has its own.

    As text `gemv_multi:8` or `gemv_multi:8;3584x18944/4=gemm:32`.
    """

    way: Way
    by_shape: tuple[tuple[str, Way], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Reads the text; raises ValueError for another form."""
        first, *others = text.split(";")
        return cls(_way(first), tuple(map(_way_of_shape, others)))

    def __str__(self) -> str:
        """The text."""
        own = (f"{shape}={name(way)}" for shape, way in self.by_shape)
        return ";".join((name(self.way), *own))

    def of(self, shape: str) -> Way:
        """The way of a layer."""
        return dict(self.by_shape).get(shape, self.way)

    def ways(self) -> Iterator[Way]:
        """Every way that occurs."""
        yield self.way
        for _, way in self.by_shape:
            yield way


def name(way: Way) -> str:
    """A way as text."""
    return f"{way[0]}:{way[1]}"


def _way(text: str) -> Way:
    path, _, tile = text.partition(":")
    if not tile.isdecimal():
        raise ValueError(f"[metal] a way must be kernel:tile, got {text!r}")
    return path, int(tile)


def _way_of_shape(text: str) -> tuple[str, Way]:
    shape, _, way = text.partition("=")
    return shape, _way(way)


@dataclass(frozen=True, slots=True)
class LinearProfile:
    """Which kernel takes which row count of which layer."""

    # Rows that gemv_multi compiles for; a step takes the least that holds its rows.
    row_tiles: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    gemv_tiles: tuple[int, ...] = (1, 2)  # R of gemv: output tiles of a lane; the default first
    gemm_rows: tuple[int, ...] = (32, 64)  # BM of gemm, likewise
    wide_tiles: tuple[int, ...] = (2, 4, 8)  # V of gemv_wide, tried where they hold the rows
    use_gemv: bool = True
    use_gemm: bool = True
    # By most rows, ascending: what a measurement found for rows up to there.
    tuned: tuple[tuple[int, Choice], ...] = ()

    def choose(self, rows: int, shape: str = "") -> Way:
        """Kernel and its tile for a row count and a layer's shape (`DeviceWeight.shape`)."""
        for bound, choice in self.tuned:
            way = choice.of(shape)
            if rows <= bound and (way[0] != GEMV or rows == 1):
                return way
        return self._default(rows)

    def ways(self, rows: int) -> list[Way]:
        """Ways worth comparing for a row count, the default first.

        All of them were compared with the contract when the profile was verified.
        """
        fitting = [tile for tile in self.row_tiles if tile >= rows]
        half = [tile for tile in self.row_tiles if 2 * tile >= rows > tile]
        ways = [self._default(rows)]
        if rows == 1 and self.use_gemv:
            ways += [(GEMV, tile) for tile in self.gemv_tiles]
        ways += [(GEMV_MULTI, tiles[0]) for tiles in (fitting, half) if tiles]
        wide = [tile for tile in self.wide_tiles if tile >= rows > 1]
        ways += [(GEMV_WIDE, tile) for tile in wide[:1]]
        if self.use_gemm:
            ways += [(GEMM, tile) for tile in self.gemm_rows if rows >= tile // 4]
        return list(dict.fromkeys(ways))

    def variants(self) -> list[tuple[int, Way]]:
        """Every way that some row count can take, with one that takes it."""
        found: list[tuple[int, Way]] = [(tile, (GEMV_MULTI, tile)) for tile in self.row_tiles]
        found += [(tile, (GEMV_WIDE, tile)) for tile in self.wide_tiles]
        if self.use_gemv:
            found += [(1, (GEMV, tile)) for tile in self.gemv_tiles]
        if self.use_gemm:
            found += [(self.row_tiles[-1] + 1, (GEMM, tile)) for tile in self.gemm_rows]
        return found

    def choices(self, rows: int) -> list[str]:
        """The ways by name: one for all layers."""
        return [name(way) for way in self.ways(rows)]

    def tuned_by(self, choices: Mapping[int, str]) -> LinearProfile:
        """The profile with these choices; raises ValueError for one that holds another way."""
        tuned = []
        for bound in sorted(choices):
            choice = Choice.parse(choices[bound])
            known = self.ways(max(1, bound))
            if bound < 1 or not all(way in known for way in choice.ways()):
                raise ValueError(
                    f"[metal] a choice must be one of {', '.join(map(name, known))}, "
                    f"got {choices[bound]} for {bound} rows"
                )
            tuned.append((bound, choice))
        return replace(self, tuned=tuple(tuned))

    def _default(self, rows: int) -> Way:
        if rows == 1 and self.use_gemv:
            return GEMV, self.gemv_tiles[0]
        fitting = [tile for tile in self.row_tiles if tile >= rows]
        if fitting or not self.use_gemm:
            return GEMV_MULTI, fitting[0] if fitting else self.row_tiles[-1]
        return GEMM, self.gemm_rows[0]
