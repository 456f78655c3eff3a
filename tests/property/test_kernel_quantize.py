"""Quantisation, RMS norm and SwiGLU: every table equals the reference bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.row_ops import (
    FAMILIES,
    FORMATS,
    SPOILERS,
    TABLES,
    ActivationBuffer,
    Floats,
    bits,
    make_row,
    reference,
    reference_quantize,
    table_id,
)

seeds = st.integers(0, 2**32 - 1)
families = st.sampled_from(FAMILIES)
widths = st.one_of(
    st.integers(1, 100).map(lambda n: 16 * n), st.integers(1, 700), st.sampled_from([576, 1536])
)
buffers = st.fixed_dictionaries(
    {
        "panel": st.sampled_from([1, 2, 4, 8, 16]),
        "rows": st.integers(1, 20),
        "layout": st.sampled_from(FORMATS),
        "activation_bits": st.sampled_from([12, 8]),
    }
)


def check_row(buffer: ActivationBuffer, row: int, values: Floats) -> None:
    """The row holds the reference's quantisation of `values`, and nothing else is touched."""
    q, d, finite = reference_quantize(values, buffer.block, buffer.activation_bits)
    assert np.array_equal(buffer.integers(row), q)
    at = buffer.indexes(row)
    blocks = q.reshape(-1, buffer.block)
    assert np.array_equal(bits(buffer.d[at]), bits(d))
    assert np.array_equal(buffer.s[at], blocks.sum(1))
    if buffer.half_sums:
        assert np.array_equal(buffer.s_low[at], blocks[:, :16].sum(1))
        assert np.array_equal(buffer.s_high[at], blocks[:, 16:].sum(1))
    marks = np.zeros(buffer.rows, np.uint32)
    marks[row] = 0 if finite else buffer.op_index + 1
    assert np.array_equal(buffer.non_finite, marks)
    others = np.setdiff1d(np.arange(len(buffer.d)), at)
    assert np.isnan(buffer.d[others]).all()
    assert (buffer.q[others] == 0xA5).all()


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(seed=seeds, family=families, width=widths, block=st.sampled_from([32, 64]), shape=buffers)
def test_quantize(
    table: Any, seed: int, family: str, width: int, block: int, shape: dict[str, int]
) -> None:
    """quantize equals the reference for every layout, panel, width and magnitude."""
    rng = np.random.default_rng(seed)
    x = make_row(family, rng, width)
    buffer = ActivationBuffer(width, block, half_sums=block == 32, **shape)
    row = int(rng.integers(buffer.rows))
    table.quantize(x, buffer.native, row)
    check_row(buffer, row, x)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(seed=seeds, spoiler=st.sampled_from(SPOILERS), width=widths, shape=buffers)
def test_quantize_marks_non_finite_rows(
    table: Any, seed: int, spoiler: float, width: int, shape: dict[str, int]
) -> None:
    """One NaN, infinity or 2^96 marks the row and zeroes its block; a mark that is there stays."""
    rng = np.random.default_rng(seed)
    x = make_row("normal", rng, width)
    x[rng.integers(width)] = spoiler
    buffer = ActivationBuffer(width, 32, half_sums=False, **shape)
    row = int(rng.integers(buffer.rows))
    table.quantize(x, buffer.native, row)
    check_row(buffer, row, x)
    assert buffer.non_finite[row] == 7
    buffer.non_finite[row] = 3
    table.quantize(x, buffer.native, row)
    assert buffer.non_finite[row] == 3


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(
    seed=seeds,
    family=families,
    width=widths,
    epsilon=st.sampled_from([1e-5, 1e-6, 1e-12]),
    shape=buffers,
)
def test_norm(
    table: Any, seed: int, family: str, width: int, epsilon: float, shape: dict[str, int]
) -> None:
    """norm equals rms_norm of the reference, and norm_quantize the quantisation of that."""
    rng = np.random.default_rng(seed)
    x, w = make_row(family, rng, width), make_row("outliers", rng, width)
    want, y = np.empty_like(x), np.empty_like(x)
    reference.rms_norm(x, w, epsilon, want)
    table.norm(x, w, epsilon, y)
    visible = np.abs(want) >= 2.0**-100  # what is smaller vanishes in the next operation
    assert np.array_equal(bits(y[visible]), bits(want[visible])) or np.isnan(want).all()
    assert (np.abs(y[~visible]) < 2.0**-100).all() or np.isnan(want).all()
    buffer = ActivationBuffer(width, 32, half_sums=True, **shape)
    row = int(rng.integers(buffer.rows))
    table.norm_quantize(x, w, epsilon, buffer.native, row)
    check_row(buffer, row, want)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(seed=seeds, gate_family=families, up_family=families, width=widths, shape=buffers)
def test_gate(
    table: Any, seed: int, gate_family: str, up_family: str, width: int, shape: dict[str, int]
) -> None:
    """gate equals silu_mul of the reference, and gate_quantize the quantisation of that."""
    rng = np.random.default_rng(seed)
    gate, up = make_row(gate_family, rng, width), make_row(up_family, rng, width)
    if rng.random() < 0.5:
        gate = np.clip(gate, -120, 120) * np.float32(30)  # the interesting stretch of exp
    want, y = np.empty_like(gate), np.empty_like(gate)
    reference.silu_mul(gate, up, want)
    table.gate(gate, up, y)
    visible = np.abs(want) >= 2.0**-100
    assert np.array_equal(bits(y[visible]), bits(want[visible]))
    assert (np.abs(y[~visible]) < 2.0**-100).all()
    buffer = ActivationBuffer(width, 64, half_sums=False, **shape)
    row = int(rng.integers(buffer.rows))
    table.gate_quantize(gate, up, buffer.native, row)
    check_row(buffer, row, want)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
def test_norm_ignores_what_a_machine_may_flush(table: Any) -> None:
    """A square below the normal numbers must not decide how a later tie in its chain rounds."""
    x = np.zeros(512, np.float32)
    x[0], x[256] = 2.0**-64, 1 + 2.0**-12  # the second square lies half way between two floats
    ones = np.ones_like(x)
    want, y = np.empty_like(x), np.empty_like(x)
    reference.rms_norm(x, ones, 1e-12, want)
    table.norm(x, ones, 1e-12, y)
    assert np.array_equal(bits(y), bits(want))
    x[0] = 0
    table.norm(x, ones, 1e-12, y)
    assert bits(y)[256] == bits(want)[256]
