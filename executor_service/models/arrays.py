"""MLX arrays to numpy arrays. Only loaders use MLX; backends are given plain memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from executor_service.errors import ModelError
from executor_service.models.checkpoint import dense_weight, require_finite
from isobatch_kernels.program import DenseType, DenseWeight

if TYPE_CHECKING:
    from executor_service.models.checkpoint import Float32
    from isobatch_kernels.program import Array


def to_numpy(array: mx.array) -> Array:
    """Copy an array; bfloat16 becomes float32, which holds it exactly."""
    if array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array)


def vector(name: str, array: mx.array, source: str) -> Float32:
    """Return a norm or bias vector widened to fp32."""
    if array.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise ModelError(f"[model] {name} must be floating point, got {array.dtype}: {source}")
    values: Float32 = np.ascontiguousarray(np.array(array.astype(mx.float32)))
    require_finite(name, values, source)
    return values


def scales(name: str, array: mx.array, source: str) -> Array:
    """Return scales or biases of groups: float16 as they are, others as float32."""
    if array.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise ModelError(f"[model] {name} must be floating point, got {array.dtype}: {source}")
    return np.ascontiguousarray(to_numpy(array))


def matrix(name: str, array: mx.array, source: str) -> DenseWeight:
    """Return an unquantised matrix; fp32 is rounded to fp16 (numerics.md section 3)."""
    if array.ndim != 2:
        raise ModelError(f"[model] {name} must be a matrix, got shape {array.shape}: {source}")
    if array.dtype == mx.bfloat16:
        bits = np.array(array.view(mx.uint16))
        return dense_weight(name, bits, DenseType.BFLOAT16, source)
    if array.dtype not in (mx.float16, mx.float32):
        raise ModelError(f"[model] {name} must be floating point, got {array.dtype}: {source}")
    return dense_weight(name, np.array(array.astype(mx.float16)), DenseType.FLOAT16, source)
