"""The reference's pieces: ulp bounds of section 4, fp16, sums, and formulas checked by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.row_ops import Floats, bits, reference

Doubles = npt.NDArray[np.float64]


def every_float(low: float, high: float, step: int) -> Floats:
    """Every `step`-th fp32 number of [low, high)."""
    first, last = (int(bits(np.float32(x)).item()) for x in (low, high))
    return np.arange(first, last, step, dtype=np.uint32).view(np.float32)


def largest_ulp_error(got: Floats, want: Doubles) -> float:
    """Distance in units of the last place of the true value."""
    _, exponent = np.frexp(want)
    return float(np.abs((got.astype(np.float64) - want) / np.ldexp(1.0, exponent - 24)).max())


def apply(function: str, x: Floats) -> Floats:
    """One function of the reference over an array."""
    y = np.empty_like(x)
    getattr(reference, function)(x, y)
    return y


def test_recip_error() -> None:
    """At most 0.51 ulp: one octave holds every mantissa; the others differ by their exponent."""
    x = np.concatenate([every_float(1, 2, 7), every_float(2.0**-40, 2.0**96, 99991)])
    assert largest_ulp_error(apply("recip", x), 1 / x.astype(np.float64)) <= 0.51


def test_rsqrt_error() -> None:
    """At most 1.0 ulp over two octaves and over a wide range."""
    x = np.concatenate([every_float(1, 4, 13), every_float(1e-12, 2.0**96, 99991)])
    assert largest_ulp_error(apply("rsqrt", x), x.astype(np.float64) ** -0.5) <= 1.0


def test_exp_error() -> None:
    """At most 0.94 ulp between the cut at -40 and 60."""
    small = every_float(2.0**-30, 60, 997)
    x = np.concatenate([small, -small[small < 40], [0, -40]]).astype(np.float32)
    assert largest_ulp_error(apply("exp", x), np.exp(x.astype(np.float64))) <= 0.94


def test_exp_cut_and_exact_points() -> None:
    """exp(0) is 1; below the cut, at minus infinity and for NaN it is +0."""
    x = np.array([0, -0.0, np.nextafter(np.float32(-40), np.float32(-41)), -np.inf, np.nan])
    y = apply("exp", x.astype(np.float32))
    assert np.array_equal(bits(y), bits([1, 1, 0, 0, 0]))
    assert apply("exp", np.array([-40], np.float32))[0] > 0


def test_from_f16_is_exact_for_every_pattern() -> None:
    """All 65,536 patterns but NaN, against numpy."""
    h = np.arange(65536, dtype=np.uint16)
    x = np.empty(h.size, np.float32)
    reference.from_f16(h, x)
    want = h.view(np.float16).astype(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(bits(x)[number], bits(want)[number])


def test_to_f16_rounds_to_even_and_saturates() -> None:
    """Every fp16 value, midpoint, neighbour of one, and what is out of range, against numpy."""
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (values[:-1] + values[1:]) / 2
    down, up = (np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf))
    x = np.concatenate([values, middles, down, up, [65519, 65520, 1e30, np.inf, 1e-40, 2.0**-26]])
    x = np.concatenate([x, -x]).astype(np.float32)
    h = np.empty(x.size, np.uint16)
    reference.to_f16(x, h)
    want = np.clip(x, -65504, 65504).astype(np.float16)
    assert np.array_equal(h, want.view(np.uint16))


def test_sum256_is_the_tree_of_the_page() -> None:
    """The order of additions is stated, so a numpy transcript gives the same bits."""
    rng = np.random.default_rng(1)
    for n in (1, 5, 255, 256, 257, 1000, 1536):
        v = rng.random(n).astype(np.float32)
        chains = np.zeros(256, np.float32)
        for k in range(n):
            chains[k % 256] += v[k]
        width = 128
        while width:
            chains[:width] = chains[:width] + chains[width : 2 * width]
            width //= 2
        assert reference.sum256(v) == chains[0]


def test_quantize_by_hand() -> None:
    """One block whose integers are known: the largest gives 2047, ties go to even."""
    x = np.zeros(32, np.float32)
    x[:4] = [2047, -1.5, 2.5, 0.4]
    q, d = np.empty(32, np.int16), np.empty(1, np.float32)
    assert reference.quantize(x, 32, q, d) is True
    assert list(q[:4]) == [2047, -2, 2, 0]
    assert abs(float(d[0]) - 1) < 1e-7


@pytest.mark.parametrize(("group", "block"), [(16, 32), (32, 32), (64, 64), (64, 32), (128, 64)])
def test_linear_is_close_to_the_matrix_product(group: int, block: int) -> None:
    """What is computed is x @ w.T: near the fp64 product of the dequantised operands."""
    rng = np.random.default_rng(group + block)
    n, k = 5, 640
    wq = rng.integers(0, 16, (n, k)).astype(np.int16)
    scales, biases = (rng.standard_normal((n, k // group)).astype(np.float32) for _ in "sb")
    x = rng.standard_normal(k).astype(np.float32)
    q, d = np.empty(k, np.int16), np.empty(-(-k // block), np.float32)
    reference.quantize(x, block, q, d)
    y, bias = np.empty(n, np.float32), rng.standard_normal(n).astype(np.float32)
    reference.linear(wq, scales, biases, block, q, d, bias, None, y)
    w = np.repeat(scales, group, 1).astype(np.float64) * wq + np.repeat(biases, group, 1)
    want = w @ (np.repeat(d, block)[:k].astype(np.float64) * q) + bias
    assert np.abs(y - want).max() < 1e-3
    row = np.empty(k, np.float32)
    reference.embed(wq, scales, biases, 3, row)
    assert np.abs(row - w[3]).max() < 1e-5


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """a*b + c with one rounding, by exact rational arithmetic (results in the normal range)."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))  # within one step of the right one
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(bits(v).item()) & 1))


def test_linear_order_by_exact_arithmetic() -> None:
    """Sub-blocks, slices and epilogue in the stated order, each fma rounded by fractions."""
    rng = np.random.default_rng(9)
    k, b = 32 * 11, 32
    wq = rng.integers(0, 16, (1, k)).astype(np.int16)
    scales, biases = (rng.standard_normal((1, k // b)).astype(np.float32) for _ in "sb")
    q = rng.integers(-2047, 2048, k).astype(np.int16)
    d = rng.random(k // b).astype(np.float32)
    y = np.empty(1, np.float32)
    bias, residual = np.array([0.3], np.float32), np.array([-7.7], np.float32)
    reference.linear(wq, scales, biases, b, q, d, bias, residual, y)
    total: np.float32 | None = None
    for i in range(8):
        begin, end = i * 11 // 8, (i + 1) * 11 // 8
        acc = np.float32(0)
        for j in range(begin, end):
            part = slice(j * b, (j + 1) * b)
            p = int(q[part].astype(int) @ wq[0, part].astype(int))
            s = np.float32(q[part].astype(int).sum())
            t = exact_fma(float(scales[0, j]), float(p), float(biases[0, j] * s))
            acc = exact_fma(float(d[j]), float(t), float(acc))
        if begin < end:
            total = acc if total is None else total + acc
    assert total is not None
    assert bits(y)[0] == bits((total + bias[0]) + residual[0])


@pytest.mark.parametrize("bfloat", [False, True])
def test_dense_linear(bfloat: bool) -> None:
    """Near the product for ordinary rows, exact under powers of two, zero under the row floor."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((4, 100)).astype(np.float16).astype(np.float32)
    if bfloat:
        w = (bits(w) & np.uint32(0xFFFF0000)).view(np.float32)
    x = rng.standard_normal(100).astype(np.float32)
    y, scaled = np.empty(4, np.float32), np.empty(4, np.float32)
    assert reference.dense_linear(w, bfloat, x, None, None, y) is True
    assert np.abs(y - w.astype(np.float64) @ x).max() < (0.2 if bfloat else 0.02)
    assert reference.dense_linear(w, bfloat, x * np.float32(2.0**20), None, None, scaled) is True
    assert np.array_equal(scaled, y * np.float32(2.0**20))
    bias = np.arange(4, dtype=np.float32)
    assert reference.dense_linear(w, bfloat, x * np.float32(2.0**-40), bias, None, y) is True
    assert np.array_equal(y, bias)
    x[7] = np.inf
    assert reference.dense_linear(w, bfloat, x, None, None, y) is False
