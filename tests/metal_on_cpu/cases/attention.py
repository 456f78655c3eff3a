"""Cases of rope.metal and attention.metal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isobatch_kernels.metal import attention as attn
from isobatch_kernels.metal.cache import KeyValuePool, PoolLayout
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.program import Dimensions
from tests.metal_on_cpu.cases.common import Float32, assert_same_bits, launcher_of, native
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory


def _dimensions(heads: int, kv_heads: int, head_dim: int, context: int = 1024) -> Dimensions:
    return Dimensions(
        hidden_size=heads * head_dim,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8,
        context_length=context,
        attention_scale=head_dim**-0.5,
    )


def _table(dimensions: Dimensions, rotary: int) -> Float32:
    table = np.empty(dimensions.context_length * rotary, np.float32)
    native().reference.rope_table(table, rotary, 10000.0, None, 1.0)
    return table


def rope(factory: EmulatedKernelFactory) -> None:
    """Both pairings, whole and partial rotation, values near every floor, saturated keys."""
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(9), native().reference
    for interleaved, rotary, head_dim in (
        (False, 24, 24),
        (True, 24, 24),
        (False, 16, 20),
        (True, 6, 10),
    ):
        d = _dimensions(4, 2, head_dim)
        layout = PoolLayout(4, 16, d.num_kv_heads, head_dim)
        table = _table(d, rotary)
        positions = np.array([0, 1, 700, 1023, 5], np.int32)
        qkv = rng.standard_normal((5, 8, head_dim)).astype(np.float32)
        qkv[0, :, ::3] *= np.float32(2.0**-41)
        qkv[1, :, ::2] *= np.float32(1e-40)
        qkv[2, :, 1::4] *= np.float32(1e6)
        qkv[3, :4] *= np.float32(2.0**-62)
        queries, kv = attn.rope_write_kv(
            launcher, qkv, launcher.upload(positions), table, 5, d, rotary, interleaved, layout
        )
        expected_q, expected_kv = qkv[:, :4].copy(), np.empty((2, 5, 2, head_dim), np.uint16)
        for token, position in enumerate(positions.tolist()):
            reference.rope(expected_q[token], table, rotary, interleaved, position)
            keys = qkv[token, 4:6].copy()
            reference.rope(keys, table, rotary, interleaved, position)
            reference.to_f16(keys.reshape(-1), expected_kv[0, token].reshape(-1))
            reference.to_f16(qkv[token, 6:].copy().reshape(-1), expected_kv[1, token].reshape(-1))
        with np.errstate(under="ignore"):
            scaled = expected_q * np.float32(d.attention_scale)
        scaled[np.abs(scaled) < 2.0**-64] = 0
        assert_same_bits(queries, scaled.reshape(5, -1), f"queries {interleaved} {rotary}")
        assert_same_bits(
            kv.view(np.uint16).reshape(expected_kv.shape), expected_kv, "keys and values"
        )


def rope_non_finite(factory: EmulatedKernelFactory) -> None:
    """A token with such a value has NaN queries; its neighbours notice nothing."""
    launcher, rng = launcher_of(factory), np.random.default_rng(10)
    d = _dimensions(2, 1, 16)
    layout = PoolLayout(4, 16, 1, 16)
    for head in (0, 2, 3):
        qkv = rng.standard_normal((3, 4, 16)).astype(np.float32)
        qkv[1, head, 3] = 2.0**97
        positions = launcher.upload(np.arange(3, dtype=np.int32))
        queries, kv = attn.rope_write_kv(
            launcher, qkv, positions, _table(d, 16), 3, d, 16, False, layout
        )
        assert np.isnan(queries).all(axis=1).tolist() == [False, True, False]
        assert np.isfinite(kv).all()


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Rows of a step over a filled pool, and what the reference makes of them."""

    dimensions: Dimensions
    pool: KeyValuePool
    tables: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    queries: Float32
    expected: Float32


def _sequences(
    launcher: Launcher, d: Dimensions, rows: tuple[tuple[int, int], ...], window: int
) -> _Sequences:
    """rows: (first position, tokens). Unused cells of the pool hold NaN."""
    rng = np.random.default_rng((d.num_heads, d.head_dim, window, *rows[0]))
    reference = native().reference
    most = max(-(-(first + count) // 16) for first, count in rows)
    tables = np.full((len(rows), most), -1, np.int32)
    order, taken = rng.permutation(most * len(rows) + 3), 0
    layout = PoolLayout(len(order), 16, d.num_kv_heads, d.head_dim)
    pool = KeyValuePool(launcher.arrays, layout, 1)
    every = np.arange(layout.num_rows, dtype=np.int32)
    pool.write(0, every, np.full((layout.num_rows, layout.vector), np.nan, np.float16))
    queries, expected, positions = [], [], []
    for row, (first, count) in enumerate(rows):
        length = first + count
        blocks = -(-length // 16)
        tables[row, :blocks] = order[taken : taken + blocks]
        taken += blocks
        keys, values = rng.standard_normal((2, length, d.num_kv_heads, d.head_dim)).astype(
            np.float16
        )
        keys[:: max(1, length // 5)] *= np.float16(6)
        at = np.arange(length, dtype=np.int32)
        places = layout.rows_of_positions(tables[row, at // 16], at % 16)
        pool.write(
            0,
            places,
            np.concatenate([keys.reshape(-1), values.reshape(-1)]).reshape(-1, layout.vector),
        )
        for position in range(first, length):
            q = rng.standard_normal((d.num_heads, d.head_dim)).astype(np.float32) * np.float32(0.4)
            out = np.empty_like(q)
            visible = max(0, position + 1 - window) if window else 0
            for head in range(d.num_heads):
                kv = head * d.num_kv_heads // d.num_heads
                seen = [
                    np.ascontiguousarray(part[: position + 1, kv].astype(np.float32))
                    for part in (keys, values)
                ]
                reference.attention(q[head], *seen, visible, out[head])
            queries.append(q.reshape(-1))
            expected.append(out.reshape(-1))
            positions.append(position)
    if window:  # blocks that nobody can see any more are freed
        for row, (first, _) in enumerate(rows):
            tables[row, : max(0, first + 1 - window) // 16] = -1
    starts = np.cumsum([0, *(count for _, count in rows)]).astype(np.int32)
    return _Sequences(
        d,
        pool,
        tables,
        starts,
        np.array(positions, np.int32),
        np.array(queries),
        np.array(expected),
    )


def _run(launcher: Launcher, case: _Sequences, window: int, split: bool) -> Float32:
    shape = attn.attention_shape(case.dimensions, int(np.diff(case.starts).max()))
    tiles = attn.token_tiles(case.starts, shape.token_tile)
    step = attn.AttentionStep(
        shape=shape,
        tables=launcher.upload(case.tables),
        positions=launcher.upload(case.positions),
        tiles=launcher.upload(tiles),
        num_tiles=len(tiles),
        num_tokens=len(case.positions),
        max_blocks=case.tables.shape[1],
        max_chunks=int(case.positions.max()) // attn.CHUNK + 1,
        split=split,
    )
    queries = np.concatenate([case.queries.reshape(-1), np.zeros(8, np.float32)])
    pool = case.pool
    out: Float32 = attn.paged_attention(launcher, queries, pool.layer(0), pool.layout, step, window)
    return out


def attention(factory: EmulatedKernelFactory) -> None:
    """Groups, head sizes, chunk borders and windows; both forms give the reference's bits."""
    launcher = launcher_of(factory)
    for heads, kv_heads, head_dim, rows, window in (
        (3, 1, 16, ((0, 20), (5, 1), (250, 12)), 0),
        (4, 2, 24, ((255, 3), (600, 1), (256, 1)), 0),
        (9, 1, 10, ((0, 3), (257, 2)), 0),
        (2, 2, 64, ((300, 1), (14, 1)), 40),
        (7, 1, 128, ((254, 4),), 300),
        (1, 1, 256, ((255, 3),), 0),
    ):
        case = _sequences(launcher, _dimensions(heads, kv_heads, head_dim), rows, window)
        for split in (False, True):
            got = _run(launcher, case, window, split)
            assert_same_bits(
                got, case.expected, f"{heads}/{kv_heads}x{head_dim} {rows} {window} {split}"
            )


CASES = (rope, rope_non_finite, attention)
