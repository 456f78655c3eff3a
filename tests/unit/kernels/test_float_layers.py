"""The float linear kernels alone: every unit equals the reference, and the two kernels differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.kernel_programs import UNITS, bits, native

Float32 = npt.NDArray[np.float32]
KERNELS = ("gemv", "gemm")
FORMATS = [(4, 64), (4, 128), (4, 32), (8, 32), (8, 64), (2, 16), (3, 32), (6, 64)]


def _arrays(n: int, k: int, bit: int, group: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.5, 2, (n, k // group)) / (1 << bit) / np.sqrt(k)
    return {
        "packed": rng.integers(0, 2**32, (n, k * bit // 32), dtype=np.uint32),
        "scales": scales.astype(np.float16),
        "biases": (-scales * (1 << (bit - 1))).astype(np.float16),
        "bits": bit,
        "group_size": group,
    }


def _quantized(unit: str, arrays: dict[str, Any]) -> Any:
    return native.FloatLayer.quantized(unit, **arrays)


def _dense(unit: str, n: int, k: int, bfloat: bool) -> Any:
    values = np.random.default_rng(3).standard_normal((n, k)).astype(np.float32)
    stored = values.view(np.uint32) >> 16 if bfloat else values.astype(np.float16).view(np.uint16)
    return native.FloatLayer.dense(unit, stored.astype(np.uint16), bfloat)


def _rows(m: int, k: int, seed: int = 1) -> Float32:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def _run(layer: Any, x: Float32, kernel: str, n: int, **terms: Float32) -> Float32:
    y = np.full((len(x), n), np.nan, np.float32)
    finite = np.zeros(len(x), np.bool_)
    layer.forward(x, y, finite, gemv=kernel == "gemv", **terms)
    assert finite.all()
    return y


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("bit", "group"), FORMATS)
def test_every_unit_equals_the_reference(bit: int, group: int, kernel: str) -> None:
    n, k = 70, 384
    arrays = _arrays(n, k, bit, group)
    x = _rows(14, k)
    bias, residual = _rows(1, n, 2)[0], _rows(14, n, 3)
    expected = _run(_quantized("reference", arrays), x, kernel, n, bias=bias, residual=residual)
    for unit in UNITS:
        got = _run(_quantized(unit, arrays), x, kernel, n, bias=bias, residual=residual)
        assert np.array_equal(bits(got), bits(expected)), unit


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bfloat", [False, True])
def test_every_unit_equals_the_reference_on_dense_weights(bfloat: bool, kernel: str) -> None:
    n, k = 45, 267
    x = _rows(7, k)
    expected = _run(_dense("reference", n, k, bfloat), x, kernel, n)
    for unit in UNITS:
        assert np.array_equal(bits(_run(_dense(unit, n, k, bfloat), x, kernel, n)), bits(expected))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_gives_a_row_the_same_bits_in_any_batch(unit: str, kernel: str) -> None:
    n, k = 64, 256
    layer = _quantized(unit, _arrays(n, k, 4, 64))
    x = _rows(101, k)
    alone = np.concatenate([_run(layer, row[None], kernel, n) for row in x])
    for m in (2, 4, 5, 12, 13, 25, 97, 101):
        assert np.array_equal(bits(_run(layer, x[:m], kernel, n)), bits(alone[:m])), m


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (1536, 576), (960, 576)])
def test_the_kernels_round_otherwise_on_real_shapes(n: int, k: int) -> None:
    layer = _quantized(UNITS[-1], _arrays(n, k, 4, 64))
    x = _rows(16, k)
    gemv, gemm = (_run(layer, x, kernel, n) for kernel in KERNELS)
    differing = np.flatnonzero(bits(gemv) != bits(gemm))
    assert 0 < differing.size < gemv.size
    # One unit in the last place of fp16 at most, in the scale of the values.
    np.testing.assert_allclose(gemv, gemm, rtol=2**-9, atol=2**-12)


def test_results_are_halves_near_the_true_product() -> None:
    n, k = 96, 512
    arrays = _arrays(n, k, 4, 64)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    q = ((arrays["packed"][:, :, None] >> shifts) & 15).reshape(n, k).astype(np.float64)
    scales, biases = (np.repeat(arrays[each], 64, axis=1).astype(np.float64)
                      for each in ("scales", "biases"))  # fmt: skip
    x = _rows(3, k)
    exact = x.astype(np.float16).astype(np.float64) @ (q * scales + biases).T
    for kernel in KERNELS:
        y = _run(_quantized(UNITS[-1], arrays), x, kernel, n)
        assert np.array_equal(y, y.astype(np.float16).astype(np.float32))
        np.testing.assert_allclose(y, exact, rtol=2**-9, atol=2**-11)


@pytest.mark.parametrize("unit", [*UNITS, "reference"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_is_told_and_touches_no_other(unit: str, kernel: str, bad: float) -> None:
    n, k = 40, 128
    layer = _quantized(unit, _arrays(n, k, 4, 64))
    x = _rows(6, k)
    expected = _run(layer, x, kernel, n)
    x[2, 77] = bad
    y, finite = np.zeros((6, n), np.float32), np.zeros(6, np.bool_)
    layer.forward(x, y, finite, gemv=kernel == "gemv")
    assert finite.tolist() == [True, True, False, True, True, True]
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(bits(y[others]), bits(expected[others]))


@pytest.mark.parametrize("unit", [*UNITS, "reference"])
def test_large_values_saturate_at_the_largest_half(unit: str) -> None:
    n, k = 32, 64
    arrays = _arrays(n, k, 4, 64)
    arrays["scales"] = np.full((n, 1), 60000, np.float16)
    arrays["biases"] = np.zeros((n, 1), np.float16)
    for kernel in KERNELS:
        y = _run(_quantized(unit, arrays), np.full((1, k), 1e6, np.float32), kernel, n)
        assert (y == 65504).all()
