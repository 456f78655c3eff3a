"""Linear kernels of every instruction set equal the reference bit for bit, for any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch_kernels.self_test import random_weight
from tests.support.kernel_programs import UNITS, bits, native

ROWS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128, 512]))
# Magnitudes of a block of 32: ordinary, around every floor and limit, subnormal.
FACTORS = np.array(
    [1, 1, 1, 0, 3000, 2.0**-38, 2.0**-39, 2.0**-40, 2.0**-41, 1e-40, 2.0**60, 2.0**93, 2.0**95],
    dtype=np.float32,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A weight of any format, the activation block it is used with, and a number of rows."""
    rows = draw(ROWS)
    width = draw(st.integers(2, 8))
    group = draw(st.sampled_from([16, 32, 64, 128]))
    block = draw(st.sampled_from([32, 64])) if group >= 64 else 32
    groups = draw(st.integers(1, (1024 if rows <= 40 else 384) // group))
    if groups * group * width % 32:  # rows are whole words
        groups += 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = random_weight(
        rng,
        draw(st.integers(1, 70 if rows <= 40 else 20)),
        groups * group,
        width,
        group,
        half=draw(st.booleans()),
    )
    return weight, block, rows


def make_rows(rng: np.random.Generator, rows: int, width: int) -> Any:
    """Rows of all magnitudes; some not finite; some whose neighbouring blocks cancel."""
    x = rng.standard_normal((rows, width)).astype(np.float32)
    for start in range(0, width, 32):
        x[:, start : start + 32] *= rng.choice(FACTORS, (rows, 1))
    cancels = rng.random(rows) < 0.2
    half = width // 64 * 32
    x[cancels, half : 2 * half] = -x[cancels, :half]
    garbage = rng.random(rows) < 0.2
    x[garbage, rng.integers(width)] = rng.choice(np.array([np.nan, np.inf, -np.inf, 2.0**96]))
    return x


def forward(layer: Any, x: Any, outputs: int, **options: Any) -> tuple[Any, Any]:
    y = np.full((len(x), outputs), np.nan, dtype=np.float32)
    finite = np.empty(len(x), dtype=np.bool_)
    layer.forward(x, y, finite, **options)
    return y, finite


@pytest.mark.parametrize("unit", UNITS)
@given(
    case=layers(),
    seed=st.integers(0, 2**32),
    repeats=st.booleans(),
    activation_bits=st.sampled_from([12, 8]),
)
def test_a_layer_equals_the_reference(
    unit: str, case: tuple[Any, int, int], seed: int, repeats: bool, activation_bits: int
) -> None:
    """Any bits, groups, rows, magnitudes; garbage in other rows; subnormals kept or flushed."""
    weight, block, rows = case
    if repeats:  # equal groups along K, so that cancelling rows cancel exactly
        weight.scales[:] = weight.scales[:, :1]
        weight.biases[:] = weight.biases[:, :1]
        weight.packed[:] = weight.packed[:, :1]
    rng = np.random.default_rng(seed)
    n = weight.num_outputs
    x = make_rows(rng, rows, weight.num_inputs)
    bias = rng.standard_normal(n).astype(np.float32) if rng.random() < 0.5 else None
    residual = rng.standard_normal((rows, n)).astype(np.float32) if rng.random() < 0.5 else None
    fast, plain = (
        native.LinearLayer.quantized(
            name,
            weight.packed,
            weight.scales,
            weight.biases,
            weight.bits,
            weight.group_size,
            block,
            activation_bits,
        )
        for name in (unit, "reference")
    )
    expected, finite = forward(plain, x, n, bias=bias, residual=residual)
    for flush in (False, True):
        got, seen = forward(fast, x, n, bias=bias, residual=residual, flush_subnormals=flush)
        assert seen.tolist() == finite.tolist()
        assert (bits(got)[finite] == bits(expected)[finite]).all()
    alone = int(rng.integers(rows))
    rest = None if residual is None else residual[alone : alone + 1]
    got, _ = forward(fast, x[alone : alone + 1], n, bias=bias, residual=rest)
    assert not finite[alone] or (bits(got)[0] == bits(expected)[alone]).all()


@pytest.mark.parametrize("unit", UNITS)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
    rows=st.integers(1, 20),
    bfloat=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_dense_layer_equals_the_reference(
    unit: str, shape: tuple[int, int], rows: int, bfloat: bool, seed: int
) -> None:
    """16-bit matrices with weights and rows around their floors."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    w = rng.standard_normal(shape).astype(np.float32)
    w *= rng.choice(np.array([1, 1, 0, 2.0**-20, 2.0**-39, 2.0**-41], np.float32), shape)
    values = w.view(np.uint32) >> 16 if bfloat else w.astype(np.float16).view(np.uint16)
    values = values.astype(np.uint16)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    x *= rng.choice(np.array([1, 1, 2.0**-30, 2.0**-39, 2.0**-41, 1e-40], np.float32), x.shape)
    x *= rng.choice(np.array([1, 0, 2.0**-29, 2.0**-31, 2.0**90], np.float32), (rows, 1))
    if rows > 2:
        x[rng.integers(rows), rng.integers(inputs)] = np.nan
    fast, plain = (native.LinearLayer.dense(name, values, bfloat) for name in (unit, "reference"))
    expected, _ = forward(plain, x, outputs)
    for flush in (False, True):
        got, finite = forward(fast, x, outputs, flush_subnormals=flush)
        assert (bits(got)[finite] == bits(expected)[finite]).all()
        assert finite.tolist() == (np.abs(x).max(axis=1) < 2.0**96).tolist()
