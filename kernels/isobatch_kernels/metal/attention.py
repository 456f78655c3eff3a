"""RoPE, cache writes and paged attention on the device (rope.metal, attention.metal)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from isobatch_kernels.metal.launch import GROUP

if TYPE_CHECKING:
    from isobatch_kernels.metal.arrays import LibraryArray
    from isobatch_kernels.metal.cache import PoolLayout
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.program import Dimensions

Int32 = npt.NDArray[np.int32]
CHUNK = 256
LARGEST_HEAD = 256
_LANES = 32


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How query rows are cut into threadgroups. A matter of speed alone."""

    heads: int
    kv_heads: int
    head_dim: int
    head_tile: int  # query heads of a threadgroup
    token_tile: int  # tokens of a threadgroup, all of one sequence

    @property
    def rows(self) -> int:
        """Query rows of a threadgroup."""
        return self.head_tile * self.token_tile

    @property
    def head_tiles(self) -> int:
        """Threadgroups that share the heads of a token tile."""
        group = self.heads // self.kv_heads
        return self.kv_heads * -(-group // self.head_tile)

    @property
    def owned(self) -> int:
        """Output rows of a thread."""
        return -(-self.rows // (GROUP // self.head_dim))


def attention_shape(dimensions: Dimensions, longest_row: int) -> AttentionShape:
    """Shape for a step whose longest token row has that many tokens."""
    if dimensions.head_dim > LARGEST_HEAD:
        raise ValueError(
            f"[metal] head_dim must be at most {LARGEST_HEAD}, got {dimensions.head_dim}"
        )
    # Queries, weights and the rest of a threadgroup stay under 16 KiB.
    most = 8 if dimensions.head_dim <= 192 else 4
    group = dimensions.num_heads // dimensions.num_kv_heads
    head_tile = -(-group // -(-group // most))
    token_tile = 1 if longest_row == 1 else max(1, most // head_tile)
    return AttentionShape(
        dimensions.num_heads, dimensions.num_kv_heads, dimensions.head_dim, head_tile, token_tile
    )


def token_tiles(query_start_loc: Int32, token_tile: int) -> Int32:
    """(tiles, 3): first token, tokens, token row."""
    tiles = [
        (first, min(token_tile, end - first), row)
        for row, (begin, end) in enumerate(
            zip(query_start_loc[:-1].tolist(), query_start_loc[1:].tolist(), strict=True)
        )
        for first in range(begin, end, token_tile)
    ]
    return np.array(tiles, np.int32)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A step's arrays on the device that attention reads."""

    shape: AttentionShape
    tables: LibraryArray  # (S, max_blocks)
    positions: LibraryArray  # (T,)
    tiles: LibraryArray
    num_tiles: int
    num_tokens: int
    max_blocks: int
    max_chunks: int
    split: bool  # every chunk its own threadgroup


def rope_write_kv(
    launcher: Launcher,
    qkv: LibraryArray,
    positions: LibraryArray,
    table: LibraryArray,
    tokens: int,
    dimensions: Dimensions,
    rotary_dim: int,
    interleaved: bool,
    layout: PoolLayout,
) -> tuple[LibraryArray, LibraryArray]:
    """Queries (T, H*D), roped and scaled, and keys and values (2*T*KV*D/vector, vector)."""
    d = dimensions
    sizes = launcher.numbers(d.num_heads, d.num_kv_heads, d.head_dim, rotary_dim, tokens)
    queries, kv = launcher.run(
        "rope_write_kv",
        [qkv, positions, table, sizes, launcher.constants(d.attention_scale)],
        [
            ((tokens, d.num_heads * d.head_dim), "float32"),
            ((2 * tokens * d.num_kv_heads * layout.vectors, layout.vector), "float16"),
        ],
        (1, tokens, 1),
        template=[("INTERLEAVED", interleaved)],
    )
    return queries, kv


def paged_attention(
    launcher: Launcher,
    queries: LibraryArray,
    pool: LibraryArray,
    layout: PoolLayout,
    step: AttentionStep,
    window: int,
) -> LibraryArray:
    """Attention of every token over its sequence's cache, (T, H*D) float32."""
    shape = step.shape
    sizes = launcher.numbers(
        *(shape.heads, shape.kv_heads, shape.head_dim, layout.block_size),
        *(step.max_blocks, window, shape.head_tile, step.max_chunks),
    )
    inputs = [queries, pool, step.tables, step.positions, step.tiles, sizes]
    template = [
        ("R", shape.rows),
        ("VEC", layout.vector),
        ("DIM", shape.head_dim),
        ("BLOCK", layout.block_size),
        ("OWN", shape.owned),
    ]
    output = [((step.num_tokens, shape.heads * shape.head_dim), "float32")]
    if not step.split:
        grid = (1, step.num_tiles, shape.head_tiles)
        return launcher.run("attention_prefill", inputs, output, grid, template=template)[0]
    rows = step.num_tokens * shape.heads
    (partials,) = launcher.run(
        "attention_decode",
        inputs,
        [((rows, step.max_chunks, shape.head_dim + 2), "float32")],
        (1, step.num_tiles * step.max_chunks, shape.head_tiles),
        template=template,
    )
    grid = (-(-shape.head_dim // _LANES), shape.heads, step.num_tokens)
    merged = [partials, step.positions, sizes]
    return launcher.run("attention_merge", merged, output, grid, threads=_LANES)[0]
