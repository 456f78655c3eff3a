"""RoPE of queries and the write to the cache: every table equals the reference bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.row_ops import (
    FAMILIES,
    NAN_F16,
    SPOILERS,
    TABLES,
    Floats,
    SequenceCache,
    bits,
    make_row,
    reference,
    table_id,
)

seeds = st.integers(0, 2**32 - 1)
families = st.sampled_from(FAMILIES)
NUM_POSITIONS = 40


@st.composite
def head_shapes(draw: st.DrawFn) -> tuple[int, int]:
    """(head_dim, rotary_dim): rotated in full, in part or not at all."""
    head_dim = draw(st.sampled_from([2, 16, 18, 64, 80, 96, 128]))
    return head_dim, draw(st.sampled_from([head_dim, head_dim // 4 * 2, 0]))


def rope_table(rotary_dim: int) -> Floats:
    """cos and sin of the first positions, as the engine builds them."""
    table = np.zeros((NUM_POSITIONS, max(rotary_dim // 2, 1), 2), np.float32)
    if rotary_dim:
        reference.rope_table(table, rotary_dim, 10000.0)
    return table


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(
    seed=seeds,
    family=families,
    shape=head_shapes(),
    heads=st.integers(1, 9),
    interleaved=st.booleans(),
    position=st.integers(0, NUM_POSITIONS - 1),
    scale=st.sampled_from([1.0, 0.125, 64**-0.5, 96**-0.5]),
)
def test_rope_query(
    table: Any,
    seed: int,
    family: str,
    shape: tuple[int, int],
    heads: int,
    interleaved: bool,
    position: int,
    scale: float,
) -> None:
    """Queries are rotated, scaled and floored as the reference says."""
    head_dim, rotary_dim = shape
    rope = rope_table(rotary_dim)
    q = make_row(family, np.random.default_rng(seed), heads * head_dim).reshape(heads, head_dim)
    want = q.copy()
    reference.rope(want, rope, rotary_dim, interleaved, position)
    want *= np.float32(scale)
    want[np.abs(want) < 2.0**-64] = 0
    assert table.rope_query(q, scale, rope, rotary_dim, interleaved, position) is True
    assert np.array_equal(bits(q), bits(want))


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(
    seed=seeds,
    family=families,
    shape=head_shapes(),
    heads=st.integers(1, 4),
    interleaved=st.booleans(),
    position=st.integers(0, NUM_POSITIONS - 1),
)
def test_write_kv(
    table: Any,
    seed: int,
    family: str,
    shape: tuple[int, int],
    heads: int,
    interleaved: bool,
    position: int,
) -> None:
    """Keys are rotated, keys and values stored as saturated fp16, and no other slot is touched."""
    head_dim, rotary_dim = shape
    rope, rng = rope_table(rotary_dim), np.random.default_rng(seed)
    k, v = (make_row(family, rng, heads * head_dim).reshape(heads, head_dim) for _ in "kv")
    roped = k.copy()
    reference.rope(roped, rope, rotary_dim, interleaved, position)
    want_k, want_v = (np.empty(x.shape, np.uint16) for x in (k, v))
    reference.to_f16(roped, want_k)
    reference.to_f16(v, want_v)

    cache = SequenceCache(NUM_POSITIONS, heads, head_dim, rng)
    block, slot = cache.place(position)
    args = (rope, rotary_dim, interleaved, position, cache.native, block, slot)
    assert table.write_kv(k, v, *args) is True
    assert np.array_equal(cache.keys[block, :, :, slot], want_k)
    assert np.array_equal(cache.values[block, :, slot, :], want_v)
    cache.keys[block, :, :, slot] = cache.values[block, :, slot, :] = NAN_F16
    assert (cache.keys == NAN_F16).all()
    assert (cache.values == NAN_F16).all()


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(seed=seeds, spoiler=st.sampled_from(SPOILERS), head_dim=st.sampled_from([18, 64]))
def test_non_finite_values_are_reported(
    table: Any, seed: int, spoiler: float, head_dim: int
) -> None:
    """A bad value is seen wherever it is, in q, k or v, and no NaN reaches the cache."""
    rng, rope = np.random.default_rng(seed), rope_table(head_dim)
    good, bad = (make_row("normal", rng, 3 * head_dim).reshape(3, head_dim) for _ in "gb")
    bad[rng.integers(3), rng.integers(head_dim)] = spoiler
    assert table.rope_query(bad.copy(), 1.0, rope, head_dim, False, 5) is False
    cache = SequenceCache(NUM_POSITIONS, 3, head_dim, rng)
    block, slot = cache.place(5)
    args = (rope, head_dim, False, 5, cache.native, block, slot)
    assert table.write_kv(good, good, *args) is True
    assert table.write_kv(bad, good, *args) is False
    assert table.write_kv(good, bad, *args) is False
    assert np.isfinite(cache.values[block, :, slot, :].view(np.float16)).all()
