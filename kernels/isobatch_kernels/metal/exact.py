"""Class X1's linear layer in numpy, for machines whose native module is missing.

Source: docs/numerics.md sections 2 to 4. Slow; the self-test needs a few small shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from isobatch_kernels.metal.weights import affine, unpack

if TYPE_CHECKING:
    from isobatch_kernels.program import QuantizedWeight

Float32 = npt.NDArray[np.float32]
_SLICES = 8
_FLOOR_BITS = np.uint32(0x2B800000)  # 2^-40


def fma(a: Float32, b: Float32, c: Float32 | np.float32) -> Float32:
    """a*b + c rounded once to fp32, for results that are zero or normal numbers.

    The product is exact in fp64. Its sum with c is rounded to odd (the error of an fp64 sum is
    known exactly, after Knuth), so that rounding to fp32 afterwards is the only rounding.
    """
    product, addend = np.broadcast_arrays(
        np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    )
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.array(total).view(np.int64)
    even = (bits & 1) == 0
    away = (error > 0) == (total > 0)
    step = np.where(away, 1, -1)
    odd = np.where((error != 0) & even, bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def recip(a: Float32) -> Float32:
    """1/a by three Newton steps (section 4)."""
    y = (np.uint32(0x7EF311C7) - a.view(np.uint32)).view(np.float32)
    for _ in range(3):
        e = fma(-a, y, np.float32(1))
        y = fma(y, e, y)
    return y


def quantize(x: Float32, block: int) -> tuple[npt.NDArray[np.int64], Float32]:
    """Integers (M, blocks, block) and scales (M, blocks) of finite rows whose width the block
    divides."""
    blocks = np.ascontiguousarray(x).reshape(len(x), -1, block)
    largest = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=2)
    zero = largest < _FLOOR_BITS
    a = np.where(zero, np.float32(1).view(np.uint32), largest).astype(np.uint32).view(np.float32)
    inverse = np.float32(2047) * recip(a)
    q = np.clip(np.rint(blocks * inverse[:, :, None]), -2047, 2047).astype(np.int64)
    q[zero] = 0
    d = np.where(zero, np.float32(0), a * (np.float32(1) / np.float32(2047)))
    return q, d.astype(np.float32)


def linear(weight: QuantizedWeight, x: Float32, block: int) -> Float32:
    """x @ weight.T of class X1, without epilogue, (M, N)."""
    q, d = quantize(x, block)
    b = min(weight.group_size, block)
    integers = unpack(weight).astype(np.int64) - (128 if weight.bits == 8 else 0)
    scales, biases = affine(weight)
    parts = q.reshape(len(x), -1, b)
    count = parts.shape[1]
    total = np.zeros((len(x), weight.num_outputs), np.float32)
    started = False
    for i in range(_SLICES):
        begin, end = i * count // _SLICES, (i + 1) * count // _SLICES
        if begin == end:
            continue
        chain = np.zeros_like(total)
        for j in range(begin, end):
            p = (parts[:, j] @ integers[:, j * b : (j + 1) * b].T).astype(np.float32)
            s = parts[:, j].sum(axis=1).astype(np.float32)[:, None]
            group = j * b // weight.group_size
            t = fma(scales[None, :, group], p, biases[None, :, group] * s)
            chain = fma(d[:, j * b // block, None], t, chain)
        total = total + chain if started else chain
        started = True
    return total
