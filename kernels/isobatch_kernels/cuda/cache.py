"""The key/value cache on the device, and its blocks as the host sees them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isobatch_kernels.blocks import block_shape, check_block
from isobatch_kernels.cuda.device import KernelKey
from isobatch_kernels.cuda.launch import Launcher, LayerCache
from isobatch_kernels.cuda.scratch import Scratch, power_of_two
from isobatch_kernels.program import Dimensions
from isobatch_kernels.step import Int32

_HALF, _WORD = 2, 4  # bytes
KERNELS: Final = tuple(KernelKey(name, (), 0) for name in ("zero_blocks", "move_block"))


class BlockCache:
    """Blocks of keys and values of every layer; rope.cu has their layout."""

    def __init__(
        self,
        launcher: Launcher,
        scratch: Scratch,
        dimensions: Dimensions,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """Allocates and clears it."""
        self._launcher = launcher
        self._scratch = scratch
        self._dimensions = dimensions
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._values = dimensions.num_kv_heads * block_size * dimensions.head_dim  # of a block
        half = num_blocks * self._values * _HALF
        size = 2 * dimensions.num_layers * half
        self._address = launcher.device.allocate(size)
        launcher.device.clear(self._address, size)
        self.layers = tuple(
            LayerCache(self._address + 2 * i * half, self._address + (2 * i + 1) * half)
            for i in range(dimensions.num_layers)
        )

    def zero(self, block_ids: Int32) -> None:
        """Clears blocks in every layer."""
        count = len(block_ids)
        if count == 0:
            return
        ids = self._scratch.get("block ids", power_of_two(count) * _WORD)
        self._launcher.device.upload(ids, np.ascontiguousarray(block_ids, dtype=np.int32))
        self._launcher.run(
            "zero_blocks",
            (count, 2 * self._dimensions.num_layers, 1),
            [self._address, ids, self._num_blocks, self._values],
            early=False,
        )

    def read(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        dims, slots = self._dimensions, self._block_size
        raw = np.empty((dims.num_layers, 2, self._values), dtype=np.uint16)
        outside = self._move(block_id, raw.nbytes, back=False)
        self._launcher.device.synchronize()
        self._launcher.device.download(outside, raw)
        heads = (dims.num_layers, dims.num_kv_heads)
        keys = raw[:, 0].reshape(*heads, dims.head_dim // 8, slots, 8).transpose(0, 1, 3, 2, 4)
        values = raw[:, 1].reshape(*heads, slots, dims.head_dim)
        return np.stack([keys.reshape(values.shape), values], axis=1)

    def write(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read` back; raises ValueError for another shape or block."""
        dims, slots = self._dimensions, self._block_size
        check_block(bits, block_shape(dims, slots))
        heads = (dims.num_layers, dims.num_kv_heads)
        keys = bits[:, 0].reshape(*heads, slots, dims.head_dim // 8, 8).transpose(0, 1, 3, 2, 4)
        values = bits[:, 1].reshape(keys.shape)
        own = np.ascontiguousarray(np.stack([keys, values], axis=1))
        self._launcher.device.upload(self._scratch.get("one block", own.nbytes), own)
        self._move(block_id, own.nbytes, back=True)
        self._launcher.device.synchronize()

    def close(self) -> None:
        """Frees it."""
        self._launcher.device.free(self._address)

    def _move(self, block_id: int, size: int, *, back: bool) -> int:
        if not 0 <= block_id < self._num_blocks:
            raise ValueError(f"[cuda] block ids must lie in the pool, got {block_id}")
        outside = self._scratch.get("one block", size)
        arguments = [self._address, outside, block_id, self._num_blocks, self._values, int(back)]
        blocks = (1, 2 * self._dimensions.num_layers, 1)
        self._launcher.run("move_block", blocks, arguments, early=False)
        return outside
