"""A matrix as MLX multiplies it: fp16 rows in, fp16 rows out, by a kernel that may be forced."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from isobatch_kernels.mlx_device import CPU, device_kind, matrix_rows
from isobatch_kernels.program import DenseType, QuantizedWeight, Weight

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)


class MlxMatrix:
    """One weight of a Program on MLX's default device."""

    def __init__(self, weight: Weight) -> None:
        """Raises ValueError for a format that `mx.quantized_matmul` does not have."""
        self._quantized = isinstance(weight, QuantizedWeight)
        if isinstance(weight, QuantizedWeight):
            if weight.bits not in _BITS or weight.group_size not in _GROUPS:
                raise ValueError(
                    "[mlx] weights must have 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, "
                    f"got {weight.bits} bits in groups of {weight.group_size}"
                )
            biases = np.zeros_like(weight.scales) if weight.biases is None else weight.biases
            self._packed = mx.array(weight.packed)
            self._scales = mx.array(weight.scales)
            self._biases = mx.array(biases)
            self._bits, self._group_size = weight.bits, weight.group_size
            # What the product takes; an embedding is read with the stored ones.
            self._halves = tuple(
                each.astype(mx.float16).astype(_product_type())
                for each in (self._scales, self._biases)
            )
            mx.eval(self._packed, self._scales, self._biases, self._halves)
        else:
            values = mx.array(weight.values)
            self._dense = values.view(mx.bfloat16) if _is_bfloat(weight) else values
            mx.eval(self._dense)

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the matrix, (len(ids), K) fp32."""
        if not self._quantized:
            return self._dense[ids].astype(mx.float32)
        scales, biases = (each[ids].astype(mx.float32) for each in (self._scales, self._biases))
        return mx.dequantize(
            self._packed[ids], scales, biases, group_size=self._group_size, bits=self._bits
        )

    def product(self, x: mx.array, path: str) -> mx.array:
        """x (rows, K) rounded to the weight's type, times the transposed matrix; fp32 values.

        By path: "gemv" gives MLX each row in a call of its own, which takes a matrix-vector kernel
        on GPUs; "gemm" all rows in one call, with rows of zeros below them where MLX would take
        another kernel than matrix-matrix for so few; any other leaves the choice to MLX.
        """
        rows = x.shape[0]
        if path == "gemv" and rows > 1:
            return mx.concatenate([self._product(x[i : i + 1]) for i in range(rows)])
        if path == "gemm" and rows < matrix_rows():
            return self._product(mx.pad(x, [(0, matrix_rows() - rows), (0, 0)]))[:rows]
        return self._product(x)

    def _product(self, x: mx.array) -> mx.array:
        if not self._quantized:
            return (x.astype(self._dense.dtype) @ self._dense.T).astype(mx.float32)
        scales, biases = self._halves
        y = mx.quantized_matmul(
            x.astype(mx.float16).astype(_product_type()),
            self._packed,
            scales,
            biases,
            transpose=True,
            group_size=self._group_size,
            bits=self._bits,
        )
        return y.astype(mx.float16).astype(mx.float32)


def _product_type() -> mx.Dtype:
    """Halves on a GPU. MLX's CPU adds them up in software, thirty times slower than fp32."""
    return mx.float32 if device_kind() == CPU else mx.float16


def _is_bfloat(weight: Weight) -> bool:
    return not isinstance(weight, QuantizedWeight) and weight.dtype is DenseType.BFLOAT16
