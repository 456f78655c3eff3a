"""The RoPE table: accurate at any position, rounded and floored as the contract says."""

from __future__ import annotations

from decimal import Decimal, getcontext

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.row_ops import Floats, bits, reference

getcontext().prec = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628621")
Rows = npt.NDArray[np.float64]


def decimal_cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Taylor series after reduction to a quarter turn, with 60 digits."""
    quarter = (angle / (PI / 2)).to_integral_value()
    a = angle - quarter * (PI / 2)
    terms = [Decimal(1)]
    for n in range(1, 40):
        terms.append(terms[-1] * a / n)
    cos = sum((t * (-1) ** i for i, t in enumerate(terms[0::2])), Decimal(0))
    sin = sum((t * (-1) ** i for i, t in enumerate(terms[1::2])), Decimal(0))
    turned = [(cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos)]
    return turned[int(quarter) % 4]


def true_row(
    position: int, rotary_dim: int, base: float, factors: Floats | None, scale: float
) -> list[tuple[Decimal, Decimal]]:
    """cos and sin of one position by the formula, in 60 digits."""
    row = []
    log_base = Decimal(base).ln()
    for i in range(rotary_dim // 2):
        frequency = (log_base * (-2 * i) / rotary_dim).exp()
        if factors is not None:
            frequency /= Decimal(float(factors[i]))
        row.append(decimal_cos_sin(frequency * Decimal(scale) * position))
    return row


@pytest.mark.parametrize(
    ("base", "rotary_dim", "scale", "with_factors"),
    [
        (10000.0, 64, 1.0, False),
        (100000.0, 64, 1.0, False),
        (500000.0, 128, 1.0, True),
        (1000000.0, 128, 0.25, False),
        (5000000.0, 18, 1.0 / 3, True),
        (1.5, 8, 1.0, False),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2, 1023, 131071, 999_999, 1_048_575])
def test_rows_are_accurate(
    base: float, rotary_dim: int, scale: float, with_factors: bool, position: int
) -> None:
    """Before rounding every entry is within 1e-15 of the truth, up to position one million."""
    factors = None
    if with_factors:
        factors = np.linspace(1, 8, rotary_dim // 2, dtype=np.float32)
    rows = np.empty((1, rotary_dim // 2, 2))
    reference.rope_rows(rows, position, rotary_dim, base, factors, scale)
    truth = true_row(position, rotary_dim, base, factors, scale)
    error = max(
        abs(Decimal(float(got)) - want)
        for pair, true_pair in zip(rows[0], truth, strict=True)
        for got, want in zip(pair, true_pair, strict=True)
    )
    assert error < Decimal("1e-15")


def test_rows_agree_with_numpy_at_small_positions() -> None:
    """Every entry of the first positions is near numpy's (whose own angle is rounded)."""
    positions, rotary_dim = 300, 64
    rows = np.empty((positions, rotary_dim // 2, 2))
    reference.rope_rows(rows, 0, rotary_dim, 10000.0)
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    assert np.abs(rows[..., 0] - np.cos(angles)).max() < 1e-13
    assert np.abs(rows[..., 1] - np.sin(angles)).max() < 1e-13


def test_table_is_the_rounded_rows_with_the_floor() -> None:
    """Entries are the nearest fp32 numbers, +0 below 2^-24; a row does not depend on others."""
    positions, rotary_dim, base = 2000, 64, 10000.0
    rows: Rows = np.empty((positions, rotary_dim // 2, 2))
    reference.rope_rows(rows, 0, rotary_dim, base)
    want = rows.astype(np.float32)
    want[np.abs(want) < 2.0**-24] = 0
    table = np.empty_like(want)
    reference.rope_table(table, rotary_dim, base)
    assert np.array_equal(bits(table), bits(want))
    some = np.empty((3, rotary_dim // 2, 2))
    reference.rope_rows(some, 1500, rotary_dim, base)
    assert np.array_equal(some, rows[1500:1503])


def test_small_sines_are_floored() -> None:
    """A frequency so low that its sine is below 2^-24 gives +0, and cosine 1."""
    table = np.empty((2, 8, 2), np.float32)
    reference.rope_table(table, 16, 1e12)
    assert (table[1, -1] == [1, 0]).all()
    assert not np.signbit(table[1, -1, 1])
