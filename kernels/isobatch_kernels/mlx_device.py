"""The device that plain MLX operations run on: choosing it, and what it is called."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

CPU: Final = "cpu"
# Rows from which `mx.quantized_matmul` leaves its matrix-vector kernels, whatever the shape of the
# matrix (MLX 0.32): 8 on CUDA (backend/cuda/quantized/quantized.cpp), 6 to 33 by chip and shape on
# Metal (backend/metal/quantized.cpp, get_qmv_batch_limit). The CPU has one kernel.
_MATRIX_ROWS: Final = {"cuda": 8, "metal": 33, CPU: 33}


def use_device(kind: str) -> None:
    """Make "cpu", or the GPU of this MLX, the default device of this thread's operations."""
    mx.set_default_device(mx.Device(mx.cpu if kind == CPU else mx.gpu))


def device_kind() -> str:
    """Return "cpu", "cuda" or "metal": MLX's default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return CPU
    return "cuda" if mx.cuda.is_available() else "metal"


def device_name() -> str:
    """Return the default device's name in words; empty where MLX does not tell."""
    return str(mx.device_info(mx.default_device()).get("device_name", ""))


def matrix_rows() -> int:
    """Return the least rows at which the default device runs a matrix-matrix kernel."""
    return _MATRIX_ROWS[device_kind()]
