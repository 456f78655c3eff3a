"""The exponential of numeric class X1, in numpy, equal to the kernels bit for bit.

docs/numerics.md, section 4, is the definition. It needs a fused multiply-add in fp32, which numpy
has not: `fma` makes one out of fp64, where the product of two fp32 numbers is exact. Rounding the
sum to fp64 and then to fp32 is rounding once, but where the fp64 sum falls midway between two
fp32 numbers: there the lost part of the sum decides, and Knuth's two-sum gives it exactly.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# The 29 bits of an fp64 fraction that fp32 does not have, and their value midway.
_BELOW_FP32: Final = np.int64(0x1FFFFFFF)
_MIDWAY: Final = np.int64(0x10000000)

_CUT: Final = np.float32(-40.0)
_LOG2E: Final = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH: Final = np.float32(float.fromhex("0x1.63p-1"))
_LN2_LOW: Final = np.float32(float.fromhex("0x1.bd0106p-13"))
_COEFFICIENTS: Final = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1))


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """Return a*b + c of (N,) float32 arrays, rounded once; no result may be subnormal in fp32."""
    product = a.astype(np.float64)
    product *= b
    total = product + c
    bits = total.view(np.int64)
    midway = np.flatnonzero((bits & _BELOW_FP32) == _MIDWAY)
    if len(midway):
        lost = _lost_by_adding(product, c, midway)
        # One step of fp64 towards the exact sum; away from zero where that is larger.
        step = np.where(np.signbit(lost) == np.signbit(total[midway]), 1, -1)
        bits[midway] += np.where(lost != 0, step, 0)
    return total.astype(np.float32)


def _lost_by_adding(
    product: NDArray[np.float64], c: F32 | np.float32, at: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return what fp64 loses of product + c at some indexes (D. Knuth's two-sum)."""
    x = product[at]
    y = np.broadcast_to(np.asarray(c, dtype=np.float64), product.shape)[at]
    total = x + y
    back = total - x
    return (x - (total - back)) + (y - back)


def x1_exp(x: F32) -> F32:
    """Return exp(x) for a (N,) float32 array, x <= 60; x < -40 gives +0; at most 0.94 ulp."""
    is_cut = x < _CUT
    x = np.where(is_cut, np.float32(0), x)
    n = np.rint(x * _LOG2E)
    r = fma(n, -_LN2_HIGH, x)
    r = fma(n, _LN2_LOW, r)
    p = np.full(x.shape, _COEFFICIENTS[0], dtype=np.float32)
    for coefficient in _COEFFICIENTS[1:]:
        p = fma(p, r, coefficient)
    scaled = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    return np.where(is_cut, np.float32(0), scaled)
