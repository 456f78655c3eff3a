"""The paged key/value pool on the device, and where a step's keys and values go in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from isobatch_kernels.blocks import check_block

if TYPE_CHECKING:
    from isobatch_kernels.metal.arrays import ArrayLibrary, LibraryArray
    from isobatch_kernels.program import Dimensions

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Rows of `vector` halves: for a block, keys (KV, D/vector, block_size), then values
    (KV, block_size, D/vector)."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def vector(self) -> int:
        """Halves of a row: the most of 8, 4, 2, 1 that divides a head."""
        return next(v for v in (8, 4, 2, 1) if self.head_dim % v == 0)

    @property
    def vectors(self) -> int:
        """Rows of one head at one position."""
        return self.head_dim // self.vector

    @property
    def rows_of_half_block(self) -> int:
        """Rows of a block's keys, or of its values."""
        return self.num_kv_heads * self.vectors * self.block_size

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return 2 * self.num_blocks * self.rows_of_half_block

    def rows_of_positions(self, blocks: Int32, slots: Int32) -> Int32:
        """Rows for keys then values of tokens, each (T, KV, D/vector), flat.

        Args:
            blocks: (T,) block of each token.
            slots: (T,) its place in the block.
        """
        heads = np.arange(self.num_kv_heads, dtype=np.int32)[None, :, None]
        parts = np.arange(self.vectors, dtype=np.int32)[None, None, :]
        block, slot = blocks[:, None, None], slots[:, None, None]
        size = self.vectors * self.block_size
        keys = (2 * block * self.num_kv_heads + heads) * size + parts * self.block_size + slot
        values = ((2 * block + 1) * self.num_kv_heads + heads) * size + slot * self.vectors + parts
        return np.concatenate([keys.reshape(-1), values.reshape(-1)]).astype(np.int32)

    def rows_of_blocks(self, blocks: Int32) -> Int32:
        """All rows of blocks, one block after the other."""
        count = 2 * self.rows_of_half_block
        first = np.asarray(blocks, np.int32)[:, None] * np.int32(count)
        return np.asarray((first + np.arange(count, dtype=np.int32)).reshape(-1), np.int32)


@dataclass(frozen=True, slots=True)
class _Due:
    """Contents of some blocks of a layer that its next write has to be preceded by."""

    blocks: frozenset[int]
    rows: LibraryArray
    values: LibraryArray | None  # None: zeros


class KeyValuePool:
    """One array a layer, so that a layer's writes wait for nothing else.

    Writes are assignments by index, which MLX does in place when nobody else holds the array; so
    nothing here keeps a second reference to one. A step that runs holds the layers that it reads,
    which is why blocks are cleared and put back only where the next step writes a layer.
    """

    def __init__(self, arrays: ArrayLibrary, layout: PoolLayout, num_layers: int) -> None:
        self._arrays = arrays
        self.layout = layout
        self._layers = [
            arrays.zeros((layout.num_rows, layout.vector), "float16") for _ in range(num_layers)
        ]
        self._due: list[list[_Due]] = [[] for _ in range(num_layers)]

    def layer(self, index: int) -> LibraryArray:
        """The pool of one layer, for a kernel's input."""
        self._settle(index)
        return self._layers[index]

    def write(self, layer: int, rows: LibraryArray, values: LibraryArray) -> None:
        """values: (len(rows), vector) float16."""
        self._settle(layer)
        self._assign(layer, rows, values)

    def _assign(self, layer: int, rows: LibraryArray, values: LibraryArray) -> None:
        target = self._layers[layer]
        self._layers[layer] = None
        self._layers[layer] = self._arrays.scatter_rows(target, rows, values)

    def _settle(self, layer: int) -> None:
        for due in self._due[layer]:
            values = due.values
            if values is None:
                values = self._arrays.zeros((due.rows.size, self.layout.vector), "float16")
            self._assign(layer, due.rows, values)
        self._due[layer] = []

    def zero_blocks(self, blocks: Int32) -> None:
        """Clears blocks in every layer, before anything else looks at that layer."""
        if len(blocks) == 0:
            return
        outside = [int(b) for b in blocks if not 0 <= b < self.layout.num_blocks]
        if outside:
            raise ValueError(f"[metal] block ids must lie in the pool, got {outside[0]}")
        rows = self._arrays.array(self.layout.rows_of_blocks(blocks))
        for due in self._due:
            due.append(_Due(frozenset(int(b) for b in blocks), rows, None))

    def read_block(self, block: int) -> npt.NDArray[np.uint16]:
        """(num_layers, 2, num_kv_heads, block_size, head_dim) fp16 bits."""
        z = self.layout
        if not 0 <= block < z.num_blocks:
            raise ValueError(f"[metal] block ids must lie in the pool, got {block}")
        out = []
        for layer in range(len(self._layers)):
            if any(block in due.blocks for due in self._due[layer]):
                self._settle(layer)
            count = 2 * z.rows_of_half_block
            rows = self._arrays.rows(self._layers[layer], block * count, (block + 1) * count)
            data = np.ascontiguousarray(self._arrays.numpy(rows)).view(np.uint16)
            keys, values = np.split(data, 2)
            by_vector = keys.reshape(z.num_kv_heads, z.vectors, z.block_size, z.vector)
            flat = by_vector.transpose(0, 2, 1, 3).reshape(z.num_kv_heads, z.block_size, z.head_dim)
            out.append(np.stack([flat, values.reshape(flat.shape)]))
        return np.stack(out)

    def write_block(self, block: int, bits: npt.NDArray[np.uint16]) -> None:
        """The inverse of `read_block`, done before anything else looks at the block."""
        z = self.layout
        shape = (len(self._layers), 2, z.num_kv_heads, z.block_size, z.head_dim)
        check_block(bits, shape)
        if not 0 <= block < z.num_blocks:
            raise ValueError(f"[metal] block ids must lie in the pool, got {block}")
        rows = self._arrays.array(z.rows_of_blocks(np.array([block], np.int32)))
        for layer, (keys, values) in enumerate(bits):
            by_vector = keys.reshape(z.num_kv_heads, z.block_size, z.vectors, z.vector)
            data = np.concatenate([by_vector.transpose(0, 2, 1, 3).reshape(-1), values.reshape(-1)])
            contents = self._arrays.array(data.view(np.float16).reshape(-1, z.vector))
            self._due[layer].append(_Due(frozenset((block,)), rows, contents))


class BlockCopies:
    """Copies of some blocks, made layer by layer, for a run that must leave the pool alone.

    Blocks have new ids, their places in `blocks`.
    """

    def __init__(self, arrays: ArrayLibrary, pool: KeyValuePool, blocks: Int32) -> None:
        self._arrays = arrays
        self._pool = pool
        self._rows = arrays.array(pool.layout.rows_of_blocks(blocks))
        self.layout = replace(pool.layout, num_blocks=len(blocks))
        self._current: tuple[int, LibraryArray] | None = None

    def layer(self, index: int) -> LibraryArray:
        """The copy of one layer; only the last one that was asked for is kept."""
        if self._current is None or self._current[0] != index:
            copy = self._arrays.take_rows(self._pool.layer(index), self._rows)
            self._current = index, copy
        return self._current[1]

    def write(self, layer: int, rows: LibraryArray, values: LibraryArray) -> None:
        """Writes into the copy alone."""
        target = self.layer(layer)
        self._current = layer, self._arrays.scatter_rows(target, rows, values)


def pool_layout(dimensions: Dimensions, num_blocks: int, block_size: int) -> PoolLayout:
    """Layout for a model."""
    return PoolLayout(num_blocks, block_size, dimensions.num_kv_heads, dimensions.head_dim)
