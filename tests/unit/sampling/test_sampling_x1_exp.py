"""The exponential of class X1 in numpy: against exact rational arithmetic, and against pins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.sampling.x1_exp import fma, x1_exp
from tests.support import literal_sampling as literal


def _bits(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[int]:
    return [int(word) for word in values.view(np.uint32)]


arguments = st.lists(st.floats(-45, 60, width=32), min_size=1, max_size=8)
moderate = st.floats(-(2**20), 2**20, width=32).filter(lambda v: v == 0 or abs(v) > 2**-20)


@given(arguments)
def test_equal_to_exact_arithmetic(values: list[float]) -> None:
    """Every bit, over the whole range and both sides of the cut."""
    x = np.array(values, dtype=np.float32)
    expected = np.array([literal.exp(value) for value in x], dtype=np.float32)
    assert _bits(x1_exp(x)) == _bits(expected)


@given(moderate, moderate, moderate)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    """Products of 48 bits and sums that need 70 are rounded as if they were exact."""
    x, y, z = (np.array([value], dtype=np.float32) for value in (a, b, c))
    assert fma(x, y, z)[0] == literal.fma(x[0], y[0], z[0])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("addend", [2.0**-60, -(2.0**-60), 0.0])
def test_fma_where_rounding_twice_goes_wrong(sign: int, addend: float) -> None:
    """(2^12 + 1)^2 is midway between two fp32 numbers; only the lost addend tells the side."""
    a = np.array([sign * (2**12 + 1)], dtype=np.float32)
    b = np.array([2**12 + 1], dtype=np.float32)
    c = np.array([addend], dtype=np.float32)
    exact = sign * (2**24 + 2**13 + 1)
    expected = {0.0: sign * (2**24 + 2**13)}.get(addend, exact + (1 if addend > 0 else -1))
    assert fma(a, b, c)[0] == expected
    assert literal.fma(a[0], b[0], c[0]) == expected


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (0.0, 0x3F800000),
        (-0.0, 0x3F800000),
        (-40.0, None),
        (float(np.nextafter(np.float32(-40), np.float32(-41))), 0),
        (-1e30, 0),
        (-math.inf, 0),
    ],
)
def test_the_ends_of_the_range(x: float, bits: int | None) -> None:
    """exp(0) is exactly 1; at -40 it is still positive, below it is +0."""
    (got,) = _bits(x1_exp(np.array([x], dtype=np.float32)))
    assert got > 0 if bits is None else got == bits


def test_within_one_ulp_of_the_true_exponential() -> None:
    """A sanity check of the formula itself."""
    x = np.linspace(-40, 60, 20_001, dtype=np.float32)
    true = np.exp(x.astype(np.float64))
    error = np.abs(x1_exp(x).astype(np.float64) - true) / np.spacing(true.astype(np.float32))
    assert error.max() < 1.0


def test_not_monotone_in_its_last_bit() -> None:
    """Why min-p keeps a prefix of the order: a smaller logit may have the larger weight."""
    lower = np.float32(float.fromhex("-0x1.fd029cp-7"))
    higher = np.nextafter(lower, np.float32(0))
    at = x1_exp(np.array([lower, higher], dtype=np.float32))
    assert at[0] > at[1]
