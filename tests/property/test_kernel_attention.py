"""Attention over the paged cache: every table equals the reference bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.row_ops import TABLES, Floats, SequenceCache, bits, reference, table_id

CHUNK = 256
seeds = st.integers(0, 2**32 - 1)
lengths = st.one_of(
    st.integers(1, 40),
    st.integers(-17, 17).map(lambda n: CHUNK + n),
    st.integers(-2, 2).map(lambda n: 2 * CHUNK + n),
    st.integers(1, 2000),
)
head_dims = st.sampled_from([2, 16, 18, 64, 80, 96, 128])


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int]:
    """(number of keys, first visible one)."""
    length = draw(lengths)
    first = draw(st.one_of(st.just(0), st.integers(0, length - 1)))
    return length, first


def random_query(rng: np.random.Generator, group: int, head_dim: int) -> Floats:
    """Queries from flat to peaked attention, zeros and values at the query floor included."""
    q = rng.standard_normal((group, head_dim)) * 10.0 ** rng.uniform(-4, 4, (group, 1))
    q[rng.random(q.shape) < 0.1] *= 2.0**-58
    q[np.abs(q) < 2.0**-64] = 0
    return q.astype(np.float32)


def random_kv(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """fp16 values: ordinary ones, subnormal ones, the largest, zeros of both signs."""
    x = rng.standard_normal(shape).astype(np.float16)
    kind = rng.random(shape)
    x[kind < 0.05] = np.float16(2.0**-24)
    x[(kind >= 0.05) & (kind < 0.1)] *= np.float16(2.0**-14)
    x[(kind >= 0.1) & (kind < 0.12)] = np.float16(-0.0)
    if rng.random() < 0.4:  # outputs that come from keys of tiny weight alone
        x[rng.random(shape) < 0.97] = 0
    if rng.random() < 0.2:
        x[rng.integers(shape[0])] = np.float16(65504) * rng.choice([-1, 1])
    return x.astype(np.float32)


def run_reference(q: Floats, keys: Floats, values: Floats, first: int) -> Floats:
    """The reference on each query head; hidden keys are NaN, so it must not read them either."""
    out = np.empty_like(q)
    for head in range(q.shape[0]):
        reference.attention(q[head].copy(), keys, values, first, out[head])
    return out


@given(
    seed=seeds,
    window=windows(),
    head_dim=head_dims,
    group=st.integers(1, 8),
    heads=st.integers(1, 3),
)
def test_attention(
    seed: int, window: tuple[int, int], head_dim: int, group: int, heads: int
) -> None:
    """All tables, whole and by chunks with a merge, over a cache full of NaN elsewhere."""
    length, first = window
    rng = np.random.default_rng(seed)
    kv_head = int(rng.integers(heads))
    cache = SequenceCache(length, heads, head_dim, rng)
    visible = length - first
    keys, values = (random_kv(rng, (visible, heads, head_dim)) for _ in "kv")
    cache.fill(keys, values, first)
    q = random_query(rng, group, head_dim)
    dead = np.full((first, head_dim), np.nan, np.float32)
    want = run_reference(
        q,
        np.concatenate([dead, keys[:, kv_head]]),
        np.concatenate([dead, values[:, kv_head]]),
        first,
    )
    args = (cache.native, cache.table, kv_head, length - 1, first)
    chunks = (length - 1) // CHUNK + 1
    for table in TABLES:
        out = np.full_like(q, np.nan)
        table.attention(q, *args, out)
        assert np.array_equal(bits(out), bits(want)), table_id(table)

        partials = np.full((chunks + 1, group, 2 + head_dim), np.nan, np.float32)
        present = np.array(
            [table.attention_chunk(q, *args, c, partials[c]) for c in range(chunks + 1)], np.uint8
        )
        assert list(present) == [1 if first < CHUNK * (c + 1) else 0 for c in range(chunks)] + [0]
        assert np.isnan(partials[present == 0]).all()
        for head in range(group):
            out[head] = np.nan
            table.attention_merge(np.ascontiguousarray(partials[:, head]), present, out[head])
        assert np.array_equal(bits(out), bits(want)), table_id(table)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
def test_attention_of_one_key_is_its_value(table: Any) -> None:
    """One visible key has weight 1 and sum 1, so the output is the value times recip(1)."""
    rng = np.random.default_rng(5)
    cache = SequenceCache(1, 1, 64, rng)
    value = random_kv(rng, (1, 1, 64))
    cache.fill(random_kv(rng, (1, 1, 64)), value)
    one = np.ones(1, np.float32)
    reference.recip(one, one)
    out = np.empty((2, 64), np.float32)
    table.attention(random_query(rng, 2, 64), cache.native, cache.table, 0, 0, 0, out)
    assert np.array_equal(bits(out), bits(np.broadcast_to((value[0, 0] + 0.0) * one, (2, 64))))


@pytest.mark.parametrize("table", TABLES, ids=table_id)
def test_attention_is_close_to_softmax(table: Any) -> None:
    """What is computed is attention: near the fp64 softmax average (not a claim about bits)."""
    rng = np.random.default_rng(6)
    keys, values = (rng.standard_normal((700, 1, 64)).astype(np.float16) for _ in "kv")
    cache = SequenceCache(700, 1, 64, rng)
    cache.fill(keys.astype(np.float32), values.astype(np.float32))
    q = (rng.standard_normal((3, 64)) / 8).astype(np.float32)
    out = np.empty_like(q)
    table.attention(q, cache.native, cache.table, 0, 699, 0, out)
    scores = q.astype(np.float64) @ keys[:, 0].astype(np.float64).T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    assert np.abs(out - weights @ values[:, 0].astype(np.float64)).max() < 2e-6


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@pytest.mark.parametrize(("length", "first"), [(3, 1), (40, 21), (300, 270)])
def test_hidden_keys_lose_to_any_score(table: Any, length: int, first: int) -> None:
    """Visible scores may be as low as they like: what is hidden in their blocks stays hidden."""
    rng = np.random.default_rng(8)
    cache = SequenceCache(length, 1, 64, rng)
    values = random_kv(rng, (length - first, 1, 64))
    cache.fill(np.full((length - first, 1, 64), -60000, np.float32), values, first)
    q = np.full((2, 64), 1e20, np.float32)
    out = np.empty_like(q)
    table.attention(q, cache.native, cache.table, 0, length - 1, first, out)
    keys = np.full((length, 64), -60000, np.float32)
    padded = np.concatenate([np.full((first, 64), np.nan, np.float32), values[:, 0]])
    assert np.array_equal(bits(out), bits(run_reference(q, keys, padded, first)))
