"""Repacking of weights: what a stored matrix means, for every width of integer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.kernel_programs import UNITS, bits, native

WIDTHS = range(2, 9)


def pack(integers: Any, width: int) -> Any:
    """MLX's layout: integer k of a row is bits k*width.. of one big number."""
    rows = []
    for row in integers:
        number = sum(int(q) << (width * k) for k, q in enumerate(row))
        rows.append([number >> 32 * i & 0xFFFFFFFF for i in range(len(row) * width // 32)])
    return np.array(rows, dtype=np.uint32)


def contract_values(integers: Any, scales: Any, biases: Any, width: int) -> tuple[Any, Any, Any]:
    """Integers, scales and biases as the contract uses them: floors, and 8 bits re-centred."""
    floor = np.float32(2.0**-24)
    s, b = (np.where(np.abs(v) < floor, 0, v).astype(np.float32) for v in (scales, biases))
    if width < 8:
        return integers.astype(np.int16), s, b
    # 128*s is exact and so is the fp64 sum here: one rounding, as in fma.
    b = (128 * s.astype(np.float64) + b).astype(np.float32)
    b = np.where(np.abs(b) < floor, 0, b).astype(np.float32)
    return (integers.astype(np.int32) - 128).astype(np.int16), s, b


def matrix(width: int, group: int = 32, outputs: int = 5, groups: int = 3) -> Any:
    rng = np.random.default_rng(width)
    integers = rng.integers(0, 2**width, (outputs, group * groups))
    scales = rng.uniform(-0.5, 0.5, (outputs, groups)).astype(np.float32)
    biases = rng.uniform(-4, 4, (outputs, groups)).astype(np.float32)
    scales[0, 0] = 5e-8  # below the floor of 2^-24
    biases[1, 0] = -128 * scales[1, 0] + np.float32(3e-8)
    biases[2, 1] = 5e-8
    return integers, scales, biases


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("unit", [*UNITS, "reference"])
def test_a_stored_matrix_means_its_integers(unit: str, width: int) -> None:
    """Unpacked by hand and given to the definition, the same bits come out."""
    integers, scales, biases = matrix(width)
    layer = native.LinearLayer.quantized(unit, pack(integers, width), scales, biases, width, 32, 32)
    x = np.random.default_rng(1).standard_normal((1, 96)).astype(np.float32)
    got = np.empty((1, 5), np.float32)
    layer.forward(x, got, np.empty(1, np.bool_))

    q, d = np.empty(96, np.int16), np.empty(3, np.float32)
    native.reference.quantize(x[0], 32, q, d)
    wq, s, b = contract_values(integers, scales, biases, width)
    expected = np.empty(5, np.float32)
    native.reference.linear(wq, s, b, 32, q, d, None, None, expected)
    assert (bits(got[0]) == bits(expected)).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("unit", [*UNITS, "reference"])
def test_an_embedding_row_is_scale_times_integer_plus_bias(unit: str, width: int) -> None:
    """With one rounding, on the re-centred values."""
    integers, scales, biases = matrix(width)
    layer = native.LinearLayer.quantized(unit, pack(integers, width), scales, biases, width, 32, 32)
    wq, s, b = contract_values(integers, scales, biases, width)
    for row in range(5):
        got = np.empty(96, np.float32)
        layer.embed(row, got)
        s64, b64 = (np.repeat(v[row], 32).astype(np.float64) for v in (s, b))
        assert (bits(got) == bits((s64 * wq[row] + b64).astype(np.float32))).all()


@pytest.mark.parametrize("unit", UNITS)
def test_half_and_single_scales_of_equal_value_agree(unit: str) -> None:
    """How scales are stored is no part of the result."""
    integers, scales, biases = matrix(4)
    packed, half = pack(integers, 4), (scales.astype(np.float16), biases.astype(np.float16))
    x = np.random.default_rng(2).standard_normal((3, 96)).astype(np.float32)
    results = []
    for s, b in (half, tuple(v.astype(np.float32) for v in half)):
        y = np.empty((3, 5), np.float32)
        native.LinearLayer.quantized(unit, packed, s, b, 4, 32, 32).forward(
            x, y, np.empty(3, np.bool_)
        )
        results.append(y)
    assert (bits(results[0]) == bits(results[1])).all()


@pytest.mark.parametrize("unit", UNITS)
def test_no_biases_are_zero_biases(unit: str) -> None:
    """A matrix without biases computes as one whose biases are +0."""
    integers, scales, _ = matrix(4)
    packed = pack(integers, 4)
    x = np.random.default_rng(3).standard_normal((2, 96)).astype(np.float32)
    results = []
    for biases in (None, np.zeros_like(scales)):
        y = np.empty((2, 5), np.float32)
        native.LinearLayer.quantized(unit, packed, scales, biases, 4, 32, 32).forward(
            x, y, np.empty(2, np.bool_)
        )
        results.append(y)
    assert (bits(results[0]) == bits(results[1])).all()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"width": 9}, "bits must be 2 to 8"),
        ({"group": 48}, "group size must be 16, 32, 64 or 128"),
        ({"scales": np.ones((5, 2), np.float32)}, "shape"),
        ({"scales": np.ones((5, 3), np.float64)}, "float16 or float32"),
        ({"biases": np.ones((5, 3), np.float16)}, "float16 or float32"),
        ({"unit": "abacus"}, "unit must be one"),
        ({"block": 16}, "activation_block must be 32 or 64"),
    ],
)
def test_a_malformed_matrix_is_refused(change: dict[str, Any], rule: str) -> None:
    """The message names the rule."""
    _, scales, biases = matrix(4)
    packed = np.zeros((5, 12), np.uint32)
    given: dict[str, Any] = {
        "unit": "scalar",
        "packed": packed,
        "scales": scales,
        "biases": biases,
        "width": 4,
        "group": 32,
        "block": 32,
    } | change
    with pytest.raises(ValueError, match=rule):
        native.LinearLayer.quantized(*given.values())
