"""The RoPE table: by the native module, or in Python for machines that have none.

The Python is the twin of cpp/rope_table.cpp, operation by operation, so both give the same bits
(docs/numerics.md section 4). Only + - * / in fp64 and an exact fma are used, each rounded once:
numpy's are the machine's own, and never its cos, sin or pow. Sources: error-free sums and products
of Knuth and Dekker; Taylor and atanh series.
"""

from __future__ import annotations

import functools
import hashlib
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from isobatch_kernels.program import RopeSpec
    from isobatch_kernels.step import Float32

Float64 = npt.NDArray[np.float64]

DIGEST_POSITIONS: Final = 32768
"""Positions that the digest in the class id is made of, where the model has so many."""

_TABLE_FLOOR = np.float32(2.0**-24)
_SQRT_2 = float.fromhex("0x1.6a09e667f3bcdp+0")
_TWO_PI_HIGH = float.fromhex("0x1.921fb54442d18p+2")
_TWO_PI_LOW = float.fromhex("0x1.1a62633145c07p-52")
# Adding and subtracting it rounds |x| < 2^51 to the nearest integer, ties to even.
_ROUNDER = float.fromhex("0x1.8p52")
# Rows worked on at a time: a few MiB of temporaries.
_ROWS = 1024


class _Pair(NamedTuple):
    """An unevaluated sum; |lo| is at most half an ulp of hi."""

    hi: float
    lo: float


_LN_2 = _Pair(float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.abc9e3b39803fp-56"))
_INVERSE_TWO_PI = _Pair(
    float.fromhex("0x1.45f306dc9c883p-3"), float.fromhex("-0x1.6b01ec5417056p-57")
)


def fma(a: float, b: float, c: float) -> float:
    """a*b + c of finite numbers, rounded once to fp64. `math.fma` is there from Python 3.13 on.

    Exact as a fraction, and Python rounds the quotient of two integers correctly.
    """
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the product is exact, and fractions do not know a zero's sign
    return exact.numerator / exact.denominator


def _quick_sum(a: float, b: float) -> _Pair:  # |a| >= |b|
    s = a + b
    return _Pair(s, b - (s - a))


def _sum(a: float, b: float) -> _Pair:
    s = a + b
    t = s - a
    return _Pair(s, (a - (s - t)) + (b - t))


def _product(a: float, b: float) -> _Pair:
    p = a * b
    return _Pair(p, fma(a, b, -p))


def _add(a: _Pair, b: _Pair) -> _Pair:
    s, t = _sum(a.hi, b.hi), _sum(a.lo, b.lo)
    s = _quick_sum(s.hi, s.lo + t.hi)
    return _quick_sum(s.hi, s.lo + t.lo)


def _mul(a: _Pair, b: _Pair) -> _Pair:
    p = _product(a.hi, b.hi)
    return _quick_sum(p.hi, p.lo + (a.hi * b.lo + a.lo * b.hi))


def _div(a: _Pair, b: _Pair) -> _Pair:
    q1 = a.hi / b.hi
    r = _add(a, _mul(_Pair(-q1, 0.0), b))
    q2 = r.hi / b.hi
    r = _add(r, _mul(_Pair(-q2, 0.0), b))
    return _add(_quick_sum(q1, q2), _Pair(r.hi / b.hi, 0.0))


def _number(x: float) -> _Pair:
    return _Pair(x, 0.0)


@functools.cache
def _inverse(n: int) -> _Pair:
    return _div(_number(1.0), _number(float(n)))


def _nearest(x: float) -> float:
    return (x + _ROUNDER) - _ROUNDER


@functools.lru_cache(maxsize=8)
def _log2(x: float) -> _Pair:
    """log2 of a positive normal number: exponent plus 2*atanh(z)/ln 2, z = (m-1)/(m+1)."""
    m, exponent = math.frexp(x)  # exact: m in [0.5, 1)
    m, exponent = m * 2.0, exponent - 1
    if m > _SQRT_2:
        m, exponent = m * 0.5, exponent + 1
    z = _div(_sum(m, -1.0), _sum(m, 1.0))
    square = _mul(z, z)
    series = _number(0.0)
    for n in range(45, 0, -2):
        series = _add(_mul(series, square), _inverse(n))
    ln = _mul(_number(2.0), _mul(z, series))
    return _add(_number(float(exponent)), _div(ln, _LN_2))


def _exp2(x: _Pair) -> _Pair:
    """2^x for |x| <= 1000."""
    whole = _nearest(x.hi)
    r = _mul(_add(x, _number(-whole)), _LN_2)
    series = _number(1.0)
    for n in range(28, 0, -1):
        series = _add(_number(1.0), _div(_mul(series, r), _number(float(n))))
    scale = math.ldexp(1.0, int(whole))
    return _Pair(series.hi * scale, series.lo * scale)


def _leading_bits(x: float) -> float:
    bits = np.float64(x).view(np.uint64) & np.uint64(~0x7FFFFFF & 0xFFFFFFFFFFFFFFFF)
    return float(bits.view(np.float64))


def _frequency(
    i: int, rotary_dim: int, base: float, factor: float | None, position_scale: float
) -> tuple[float, float, float]:
    """Turns a position, cut so that high and middle times a position below 2^24 are exact."""
    exponent = _div(_mul(_log2(base), _number(-2.0 * i)), _number(float(rotary_dim)))
    f = _exp2(exponent)
    if factor is not None:
        f = _div(f, _number(factor))
    f = _mul(_mul(f, _number(position_scale)), _INVERSE_TWO_PI)
    high = _leading_bits(f.hi)
    rest = f.hi - high
    middle = _leading_bits(rest)
    return high, middle, (rest - middle) + f.lo


def _turn(x: Float64) -> Float64:
    """Nearest integers, ties to even."""
    return (x + _ROUNDER) - _ROUNDER


def _sine(a: Float64) -> Float64:
    x = a * a
    p = np.zeros_like(a)
    for n in range(19, 2, -2):
        p = (p + 1.0) * x / -float(n * (n - 1))
    return a + a * p


def _cosine(a: Float64) -> Float64:
    x = a * a
    p = np.zeros_like(a)
    for n in range(18, 3, -2):
        p = (p + 1.0) * x / -float(n * (n - 1))
    return 1.0 - (p + 1.0) * (x * 0.5)


def _cos_sin(frequencies: Float64, positions: Float64) -> tuple[Float64, Float64]:
    """(positions, frequencies) each; `frequencies` is (3, rotary_dim/2)."""
    high, middle = (part * positions[:, None] for part in frequencies[:2])
    low = frequencies[2] * positions[:, None]
    turn = (high - _turn(high)) + (middle - _turn(middle)) + low
    turn = turn - _turn(turn)
    quarter = _turn(4.0 * turn)
    r = turn - 0.25 * quarter
    a = r * _TWO_PI_HIGH + r * _TWO_PI_LOW
    cosine, sine = _cosine(a), _sine(a)
    which = quarter.astype(np.int64) & 3
    swapped = (which & 1).astype(bool)
    cos, sin = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    np.negative(cos, out=cos, where=(which == 1) | (which == 2))
    np.negative(sin, out=sin, where=which >= 2)
    return cos, sin


@functools.lru_cache(maxsize=4)
def rope_table(
    positions: int,
    rotary_dim: int,
    base: float,
    factors: tuple[float, ...] | None = None,
    position_scale: float = 1.0,
) -> Float32:
    """cos and sin of every position: (positions, rotary_dim/2, 2) fp32, entries below 2^-24 as +0.

    Args:
        positions: rows, fewer than 2^24.
        rotary_dim: dimensions that turn; even.
        base: the frequencies' base, positive.
        factors: divisors of the frequencies, (rotary_dim/2,), taken as fp32.
        position_scale: factor of every frequency.

    Returns:
        A table that is shared by later calls, and so read-only.
    """
    half = rotary_dim // 2
    divisors = (None,) * half if factors is None else tuple(float(np.float32(f)) for f in factors)
    frequencies = np.array(
        [_frequency(i, rotary_dim, base, divisors[i], position_scale) for i in range(half)]
    ).reshape(half, 3)
    parts = np.ascontiguousarray(frequencies.T)
    table = np.empty((positions, half, 2), np.float32)
    for begin in range(0, positions, _ROWS):
        end = min(begin + _ROWS, positions)
        cos_sin = _cos_sin(parts, np.arange(begin, end, dtype=np.float64))
        for column, values in enumerate(cos_sin):
            table[begin:end, :, column] = values
    table[np.abs(table) < _TABLE_FLOOR] = 0
    table.flags.writeable = False
    return table


def positions_needed(context_length: int, num_cached: int) -> int:
    """Return the positions that a model's table must have behind a cache of `num_cached`.

    A model may declare a million, whose table takes half a GiB, on a machine that holds a few
    thousand. Never fewer than the digest is made of, so that the class id stays the same.
    """
    return min(context_length, max(num_cached, DIGEST_POSITIONS))


def rope_digest(table: Float32, rotary_dim: int) -> str:
    """Return the first 8 hex digits of the SHA-256 of the table's first DIGEST_POSITIONS positions.

    A table may end where the cache ends, and that is no property of the arithmetic.
    """
    start = table.reshape(-1)[: DIGEST_POSITIONS * rotary_dim]
    return hashlib.sha256(start.tobytes()).hexdigest()[:8]


def build_rope_table(rope: RopeSpec, context_length: int) -> Float32:
    """(context_length, rotary_dim/2, 2) cos and sin: by the native module, or its twin in Python.

    Both give the same bits, and so the same digest in the numeric class.
    """
    try:
        from isobatch_kernels import _cpu
    except ImportError:
        return rope_table(
            context_length,
            rope.rotary_dim,
            rope.base,
            rope.frequency_factors,
            rope.position_scale,
        )
    table = np.empty((context_length, rope.rotary_dim // 2, 2), np.float32)
    factors = None
    if rope.frequency_factors is not None:
        factors = np.asarray(rope.frequency_factors, np.float32)
    _cpu.reference.rope_table(table, rope.rotary_dim, rope.base, factors, rope.position_scale)
    return table
