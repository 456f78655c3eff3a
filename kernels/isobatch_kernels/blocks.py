"""The form in which a block of the cache leaves a backend and comes back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isobatch_kernels.program import Dimensions


def block_shape(dimensions: Dimensions, block_size: int) -> tuple[int, int, int, int, int]:
    """Shape of a block's fp16 bits: layers, keys and values, heads, positions, head dimensions."""
    dims = dimensions
    return (dims.num_layers, 2, dims.num_kv_heads, block_size, dims.head_dim)


def check_block(bits: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `bits` are a block of this shape."""
    if bits.shape != shape or bits.dtype != np.uint16:
        raise ValueError(
            f"[write_block] bits must be uint16 of shape {shape}, got {bits.dtype} of {bits.shape}"
        )
