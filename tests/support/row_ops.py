"""The native row operations as tests see them: this machine's tables, buffers, rows to try.

Importing this skips the module that asks for it where the native module is not built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

native: Any = pytest.importorskip(
    "isobatch_kernels._cpu", reason="the native CPU module is not built"
)
reference: Any = native.reference

Floats = npt.NDArray[np.float32]

# Every table twice: subnormal numbers kept, and flushed to zero by the processor.
TABLES: list[Any] = [
    native.RowOps(name, flush) for name in native.row_ops_names() for flush in (False, True)
]

INT16, INT16_SHUFFLED, HALVES, BYTES = 0, 1, 2, 3
FORMATS = (INT16, INT16_SHUFFLED, HALVES, BYTES)
BLOCK_SIZE = 16
NAN_F16 = 0x7E00


def bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """The bits of fp32 values, so that == compares them exactly, zeros and NaN included."""
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def table_id(table: Any) -> str:
    """A name for parametrised tests."""
    return f"{table.name}-{'flushed' if TABLES.index(table) % 2 else 'kept'}"


@dataclass
class ActivationBuffer:
    """An activation buffer full of garbage, and the way back from its layout to plain integers."""

    width: int
    block: int
    panel: int
    rows: int
    layout: int
    half_sums: bool
    op_index: int = 6
    activation_bits: int = 12

    def __post_init__(self) -> None:
        """Allocates whole panels."""
        if self.layout == BYTES:
            self.activation_bits = 8
        self.num_blocks = -(-self.width // self.block)
        total = -(-self.rows // self.panel) * self.panel * self.num_blocks
        self.q = np.full((total, 2 * self.block), 0xA5, np.uint8)
        self.d, self.s, self.s_low, self.s_high = (
            np.full(total, np.nan, np.float32) for _ in "dslh"
        )
        self.non_finite = np.zeros(self.rows, np.uint32)
        self.native = native.Activations(
            self.width,
            self.block,
            self.panel,
            self.layout,
            self.half_sums,
            self.op_index,
            self.q,
            self.d,
            self.s,
            self.s_low,
            self.s_high,
            self.non_finite,
            self.activation_bits,
        )

    def indexes(self, row: int) -> npt.NDArray[np.int64]:
        """Where the blocks of a row are."""
        blocks = np.arange(self.num_blocks)
        return (row // self.panel * self.num_blocks + blocks) * self.panel + row % self.panel

    def integers(self, row: int) -> npt.NDArray[np.int32]:
        """The integers of a row, those past `width` included."""
        stored = np.ascontiguousarray(self.q[self.indexes(row)])
        if self.layout == HALVES:
            high = stored[:, : self.block].view(np.int8).astype(np.int32)
            low = stored[:, self.block :].astype(np.int32)
            assert low.max(initial=0) <= 15
            return (16 * high + low).reshape(-1)
        if self.layout == BYTES:
            return stored[:, : self.block].view(np.int8).astype(np.int32).reshape(-1)
        words = stored.view(np.int16).astype(np.int32)
        if self.layout == INT16_SHUFFLED:
            eights = words.reshape(-1, 8)
            words = np.empty_like(eights)
            words[:, [0, 2, 4, 6, 1, 3, 5, 7]] = eights
        return words.reshape(-1)


def reference_quantize(
    x: Floats, block: int, activation_bits: int = 12
) -> tuple[npt.NDArray[np.int32], Floats, bool]:
    """Integers padded to whole blocks, scales, and whether the row is finite."""
    num_blocks = -(-x.size // block)
    q, d = np.zeros(x.size, np.int16), np.zeros(num_blocks, np.float32)
    finite = bool(reference.quantize(x, block, q, d, activation_bits))
    padded = np.zeros(num_blocks * block, np.int32)
    padded[: x.size] = q
    return padded, d, finite


@dataclass
class SequenceCache:
    """One layer's cache with one sequence in it; everything else is NaN."""

    num_positions: int
    num_kv_heads: int
    head_dim: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        """Takes blocks in random order out of a pool with room to spare."""
        used = -(-self.num_positions // BLOCK_SIZE)
        pool = used + 3
        self.table = self.rng.permutation(pool)[:used].astype(np.int32)
        shape = (pool, self.num_kv_heads, self.head_dim, BLOCK_SIZE)
        self.keys = np.full(shape, NAN_F16, np.uint16)
        self.values = np.full((*shape[:2], BLOCK_SIZE, self.head_dim), NAN_F16, np.uint16)
        self.native = native.Cache(
            self.keys, self.values, self.num_kv_heads, self.head_dim, BLOCK_SIZE
        )

    def place(self, position: int) -> tuple[int, int]:
        """Block id and slot of a position."""
        return int(self.table[position // BLOCK_SIZE]), position % BLOCK_SIZE

    def fill(self, keys: Floats, values: Floats, first: int = 0) -> None:
        """Stores fp16 values (positions, heads, head_dim) from position `first`."""
        for i in range(keys.shape[0]):
            block, slot = self.place(first + i)
            self.keys[block, :, :, slot] = keys[i].astype(np.float16).view(np.uint16)
            self.values[block, :, slot, :] = values[i].astype(np.float16).view(np.uint16)


def _floor_rows(exponent: int) -> Callable[[np.random.Generator, int], Floats]:
    """Magnitudes within a few steps of 2^exponent, on both sides."""

    def make(rng: np.random.Generator, n: int) -> Floats:
        near = np.float32(2.0**exponent).view(np.uint32) + rng.integers(-3, 4, n)
        signs = rng.choice([-1, 1], n).astype(np.float32)
        return near.astype(np.uint32).view(np.float32) * signs

    return make


def _outliers(rng: np.random.Generator, n: int) -> Floats:
    x = rng.standard_normal(n).astype(np.float32) * np.float32(0.1)
    x[rng.random(n) < 0.02] *= np.float32(3000)
    return x


def _halfway(rng: np.random.Generator, n: int) -> Floats:
    """Values whose scaled form lies at the border between two integers."""
    x = ((rng.integers(-2047, 2047, n) + 0.5) / 2047).astype(np.float32)
    x[::16] = 1
    return x


def _wide(rng: np.random.Generator, n: int) -> Floats:
    """Magnitudes of every exponent that a finite row may have, subnormal numbers included."""
    return (rng.uniform(-1, 1, n) * 2.0 ** rng.integers(-149, 96, n)).astype(np.float32)


# Finite rows by name. "wide" and the floors are where flushed subnormal numbers could show.
ROWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda rng, n: rng.standard_normal(n).astype(np.float32),
    "outliers": _outliers,
    "halfway": _halfway,
    "zero": lambda rng, n: np.zeros(n, np.float32),
    "negative zero": lambda rng, n: np.full(n, -0.0, np.float32),
    "subnormal": lambda rng, n: (rng.uniform(-1, 1, n) * 2.0**-127).astype(np.float32),
    "block floor": _floor_rows(-40),
    "input floor": _floor_rows(-60),
    "query floor": _floor_rows(-64),
    "table floor": _floor_rows(-24),
    "huge": lambda rng, n: (rng.uniform(-1, 1, n) * 2.0**95).astype(np.float32),
    "wide": _wide,
    "all extreme": lambda rng, n: rng.choice([-1, 1], n).astype(np.float32),
}
# What makes a row non-finite.
SPOILERS = (np.nan, -np.nan, np.inf, -np.inf, 2.0**96, -(2.0**100), 3e38)


def mixed_row(rng: np.random.Generator, n: int) -> Floats:
    """A row whose stretches of 16 come from different families."""
    names = list(ROWS)
    parts = [ROWS[names[rng.integers(len(names))]](rng, 16) for _ in range(-(-n // 16))]
    return np.concatenate(parts)[:n].copy()


def make_row(family: str, rng: np.random.Generator, n: int) -> Floats:
    """One row of a family of ROWS, or of all of them ("mixed")."""
    return mixed_row(rng, n) if family == "mixed" else ROWS[family](rng, n)


FAMILIES = (*ROWS, "mixed")
