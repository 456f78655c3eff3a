"""The exponential of numeric class X1, in numpy, equal to the kernels bit for bit.

docs/numerics.md, section 4, is the definition. It needs a fused multiply-add in fp32, which numpy
has not: `fma` makes one out of fp64. The product of two fp32 numbers is exact in fp64; the sum is
rounded to odd there, and rounding that to fp32 gives the one correct rounding, because fp64 has
more than two bits over fp32 (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded
sums: proved algorithms using rounding to odd", 2008).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_CUT: Final = np.float32(-40.0)
_LOG2E: Final = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH: Final = np.float32(float.fromhex("0x1.63p-1"))
_LN2_LOW: Final = np.float32(float.fromhex("0x1.bd0106p-13"))
_COEFFICIENTS: Final = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1))


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """Return a*b + c of (N,) float32 arrays, rounded once; no result may be subnormal in fp32."""
    product = a.astype(np.float64) * np.float64(b)
    addend = np.broadcast_to(np.asarray(c, dtype=np.float64), product.shape)
    total = product + addend
    # Knuth's two-sum: `error` is exactly what the addition lost.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_even = (bits & 1) == 0
    # Away from zero where the exact sum is larger in magnitude than `total`, else towards it.
    step = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    bits += np.where((error != 0) & is_even, step, 0)
    return total.astype(np.float32)


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
