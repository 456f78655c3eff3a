"""The RoPE table without the native module: the same bits as the native one."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isobatch_kernels
from isobatch_kernels.program import RopeSpec
from isobatch_kernels.rope_table import (
    DIGEST_POSITIONS,
    build_rope_table,
    fma,
    positions_needed,
    rope_digest,
    rope_table,
)
from tests.support.kernel_programs import native

FLOATS = st.floats(-(2.0**200), 2.0**200).filter(lambda x: x == 0 or abs(x) > 2.0**-200)


def native_table(
    positions: int, rotary_dim: int, base: float, factors: tuple[float, ...] | None, scale: float
) -> np.ndarray:
    """The table that the CPU backend uses."""
    table = np.empty((positions, rotary_dim // 2, 2), np.float32)
    divisors = None if factors is None else np.asarray(factors, np.float32)
    native.reference.rope_table(table, rotary_dim, base, divisors, scale)
    return table


@pytest.mark.parametrize(
    ("positions", "rotary_dim", "base", "with_factors", "scale"),
    [
        (8192, 64, 10000.0, False, 1.0),
        (8200, 64, 100000.0, False, 1.0),
        (32768, 128, 1000000.0, False, 0.25),
        (8192, 128, 500000.0, True, 1.0),
        (9001, 18, 5000000.0, True, 1.0 / 3),
        (8192, 8, 1.5, False, 1.0),
        (8192, 16, 1e12, False, 1.0),
        (150000, 2, 10000.0, False, 1.0),
        (1, 96, 12345.678, True, 0.1),
    ],
)
def test_whole_tables_equal_the_native_ones(
    positions: int, rotary_dim: int, base: float, with_factors: bool, scale: float
) -> None:
    """Every bit, and so the digest that is part of the numeric class."""
    factors = tuple(np.linspace(1, 8.3, rotary_dim // 2).tolist()) if with_factors else None
    got = rope_table(positions, rotary_dim, base, factors, scale)
    want = native_table(positions, rotary_dim, base, factors, scale)
    assert got.shape == want.shape
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    digests = [hashlib.sha256(table.tobytes()).hexdigest() for table in (got, want)]
    assert digests[0] == digests[1]


@settings(max_examples=25)
@given(
    base=st.floats(1.001, 1e9),
    half=st.integers(1, 4),
    scale=st.floats(0.01, 8),
    factors=st.none() | st.lists(st.floats(0.5, 64, width=32), min_size=4, max_size=4),
)
def test_any_model_s_table_equals_the_native_one(
    base: float, half: int, scale: float, factors: list[float] | None
) -> None:
    """Bases, widths and factors that nobody thought of."""
    divisors = None if factors is None else tuple(factors[:half])
    got = rope_table(65, 2 * half, base, divisors, scale)
    want = native_table(65, 2 * half, base, divisors, scale)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_it_is_fast_and_made_once() -> None:
    """A start must not wait for it: 8,192 positions of 64 dimensions in under 3 seconds."""
    rope_table.cache_clear()
    begin = time.process_time()
    table = rope_table(8192, 64, 20000.0)
    assert time.process_time() - begin < 3
    assert rope_table(8192, 64, 20000.0) is table
    assert not table.flags.writeable


@given(a=FLOATS, b=FLOATS, c=FLOATS)
def test_fma_is_the_nearest_number(a: float, b: float, c: float) -> None:
    """No neighbour is nearer to the exact value, and ties go to the even one."""
    got, true = fma(a, b, c), Fraction(a) * Fraction(b) + Fraction(c)
    distance = abs(Fraction(got) - true)
    for to in (-math.inf, math.inf):
        other = math.nextafter(got, to)
        between = abs(Fraction(other) - true)
        assert distance < between or (distance == between and not _last_bit(got))


def _last_bit(x: float) -> int:
    return int(np.float64(x).view(np.uint64)) & 1


def test_fma_rounds_once_and_keeps_the_sign_of_zero() -> None:
    """Where a product and a sum, rounded one after the other, would differ."""
    e = 2.0**-52
    assert fma(1 + e, 1 + e, -(1 + 2 * e)) == e * e
    assert fma(1 + e, 1 - e, -1.0) == -e * e
    for a, b, c in ((0.0, 1.0, -0.0), (-0.0, 1.0, -0.0), (2.0, 3.0, -6.0), (-0.0, 5.0, 0.0)):
        assert math.copysign(1, fma(a, b, c)) == math.copysign(1, a * b + c)


def test_without_the_native_module_the_backend_s_table_is_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the model's scale and factors."""
    rope = RopeSpec(
        10000.0, 16, interleaved=False, position_scale=0.5, frequency_factors=(2.0,) * 8
    )
    want = build_rope_table(rope, 300)
    monkeypatch.delattr(isobatch_kernels, "_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "isobatch_kernels._cpu", None)
    before = rope_table.cache_info().misses
    got = build_rope_table(rope, 300)
    assert rope_table.cache_info().misses == before + 1
    assert got.shape == (300, 8, 2)
    assert got.tobytes() == want.tobytes()


def test_the_digest_does_not_depend_on_where_a_long_table_ends() -> None:
    rope = RopeSpec(base=10000.0, rotary_dim=2, interleaved=False)
    shortest = build_rope_table(rope, DIGEST_POSITIONS)
    longer = build_rope_table(rope, DIGEST_POSITIONS + 100)
    assert rope_digest(longer, 2) == rope_digest(shortest, 2)
    assert rope_digest(longer.reshape(-1), 2) == rope_digest(shortest, 2)
    changed = longer.copy()
    changed[DIGEST_POSITIONS - 1, 0, 1] += 1
    assert rope_digest(changed, 2) != rope_digest(shortest, 2)
    assert rope_digest(shortest[:-1], 2) != rope_digest(shortest, 2)
    whole = hashlib.sha256(shortest[:100].tobytes()).hexdigest()[:8]
    assert rope_digest(shortest[:100], 2) == whole


@pytest.mark.parametrize(
    ("context_length", "num_cached", "expected"),
    [
        (2048, 16, 2048),
        (131072, 1024, DIGEST_POSITIONS),
        (131072, 40000, 40000),
        (131072, 1 << 30, 131072),
    ],
)
def test_a_table_ends_where_the_cache_does(
    context_length: int, num_cached: int, expected: int
) -> None:
    assert positions_needed(context_length, num_cached) == expected
