"""Whole steps through the Metal backend give the CPU reference's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.metal.linear import LinearProfile
from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.program import (
    Buffer,
    DenseType,
    DenseWeight,
    Embed,
    Linear,
    NormQuantize,
    Program,
    QuantizedWeight,
)
from isobatch_kernels.self_test import random_weight, tiny_program
from tests.metal_on_cpu.backends import Pair, metal_backend
from tests.metal_on_cpu.cases.common import assert_same_bits
from tests.metal_on_cpu.harness.compiler import CompileOptions
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.launcher import RANDOM, REVERSE, LaunchOptions
from tests.support.kernel_programs import Row, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
BLOCKS = tuple(range(5, 40))
RUNS = {
    "plain": EmulatedKernelFactory(),
    "reverse": EmulatedKernelFactory(launch_options=LaunchOptions(order=REVERSE, sum_order=3)),
    "random": EmulatedKernelFactory(
        launch_options=LaunchOptions(order=RANDOM, seed=3, sum_order=1)
    ),
    "subnormals flushed": EmulatedKernelFactory(
        launch_options=LaunchOptions(flush_subnormals=True, sum_order=2)
    ),
    "contraction fast": EmulatedKernelFactory(CompileOptions(contract="fast")),
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1100, count)]


@pytest.mark.parametrize("run", RUNS)
def test_prefill_then_mixed_then_decode(run: str) -> None:
    """Three sequences through prefill, mixed steps over a chunk border, and decoding."""
    pair = Pair(PROGRAM, RUNS[run])
    a, b, c = tokens(300, 1), tokens(40, 2), tokens(9, 3)
    first, second, third = tuple(range(20)), tuple(range(20, 26)), tuple(range(30, 34))
    pair.run(make_step([Row(a[:250], 0, first), Row(b[:7], 0, second, (0, 3, 6))]))
    pair.run(
        make_step([Row(a[250:258], 250, first, ()), Row(b[7:8], 7, second), Row(c[:4], 0, third)])
    )
    got, _ = pair.run(
        make_step([Row(a[258:259], 258, first), Row(b[8:9], 8, second), Row(c[4:5], 4, third)])
    )
    pair.run(make_step([Row(a[259:260], 259, first)]))
    pair.assert_same_cache()
    paths = {(p.op, p.path) for p in got.paths}
    assert {("linear", "gemv_multi"), ("paged_attention", "attention_decode")} <= paths


def test_check_mode_finds_nothing() -> None:
    """A whole step with every access checked for races and bounds."""
    factory = EmulatedKernelFactory(CompileOptions(check=True), LaunchOptions(check=True))
    pair = Pair(PROGRAM, factory)
    pair.run(make_step([Row(tokens(11), 0, (1, 2)), Row(tokens(3), 0, (3,))]))
    pair.run(make_step([Row([5], 11, (1, 2)), Row([6], 3, (3,))]))
    pair.assert_same_cache()


def test_on_the_arrays_of_mlx() -> None:
    """The real array library (on MLX's CPU), cache writes by its scatter."""
    pair = Pair(PROGRAM, mlx=True)
    pair.run(make_step([Row(tokens(270), 0, BLOCKS), Row(tokens(5), 0, (60,))]))
    pair.run(make_step([Row([3], 270, BLOCKS), Row([4], 5, (60,))]))
    pair.assert_same_cache()
    for backend in (pair.metal, pair.cpu):
        backend.zero_blocks(np.array([60, 7], np.int32))
    pair.assert_same_cache()


@pytest.mark.parametrize("chunk", [1, 7, 16, 255])
def test_a_prompt_may_be_cut_anywhere(chunk: int) -> None:
    """The last position's bits and the cache do not depend on the cuts."""
    prompt = tokens(64 if chunk == 1 else 270)
    whole, cut = (metal_backend(PROGRAM, RUNS["plain"]) for _ in range(2))
    expected = whole.run(make_step([Row(prompt, 0, BLOCKS)]))
    for start in range(0, len(prompt), chunk):
        got = cut.run(make_step([Row(prompt[start : start + chunk], start, BLOCKS)]))
    assert_same_bits(got.logits, expected.logits)
    for block in BLOCKS:
        assert_same_bits(cut.read_block(block), whole.read_block(block))


@pytest.mark.parametrize("rows", [2, 3, 8, 25])
def test_a_row_does_not_notice_the_batch(rows: int) -> None:
    """One decode row alone and among others, wherever it stands."""
    alone, batch = (metal_backend(PROGRAM, RUNS["plain"], max_num_seqs=32) for _ in range(2))
    expected = alone.run(make_step([Row([17], 0, (0,))]))
    at = rows // 2
    members = [Row([17 if i == at else i], 0, (i,)) for i in range(rows)]
    assert_same_bits(batch.run(make_step(members)).logits[at], expected.logits[0])


@pytest.mark.parametrize(
    "profile",
    [
        MetalProfile(LinearProfile(use_gemv=False), use_split=False),
        MetalProfile(LinearProfile(use_gemm=False, gemv_tiles=(2,)), split_below=10**6),
        MetalProfile(LinearProfile(row_tiles=(1,), gemm_rows=(64,))),
    ],
    ids=["no gemv, no split", "no gemm, always split", "gemm from two rows"],
)
def test_profiles_change_no_bit(profile: MetalProfile) -> None:
    """Every fallback and every choice of tile."""
    pair = Pair(PROGRAM, RUNS["plain"], profile=profile)
    pair.run(make_step([Row(tokens(30), 0, (1, 2)), Row(tokens(260), 0, BLOCKS)]))
    pair.run(make_step([Row([3], 30, (1, 2))]))
    pair.run(make_step([Row([3], 31, (1, 2)), Row([9], 260, BLOCKS)]))
    pair.assert_same_cache()


def with_layers(**changes: Any) -> Program:
    """The tiny program with some linear layers replaced: name of out, or of out and occurrence."""
    ops = []
    for op in PROGRAM.ops:
        if isinstance(op, Linear) and op.out in changes:
            op = replace(op, **changes[op.out])
        ops.append(op)
    return replace(PROGRAM, ops=tuple(ops))


def test_merged_matrices_of_several_formats() -> None:
    """q, k and v of different bits under one bias, and a residual over parts."""
    rng = np.random.default_rng(5)
    qkv = tuple(
        random_weight(rng, n, 96, bits, 32, half=True) for n, bits in ((96, 4), (48, 8), (48, 4))
    )
    down = tuple(random_weight(rng, 48, 160, bits, 32, half=True) for bits in (4, 6))
    bias = rng.standard_normal(192).astype(np.float32)
    ops = [
        replace(op, weights=down) if isinstance(op, Linear) and op.x == "inner" else op
        for op in with_layers(qkv={"weights": qkv, "bias": bias}).ops
    ]
    pair = Pair(replace(PROGRAM, ops=tuple(ops)), RUNS["plain"])
    pair.run(make_step([Row(tokens(30), 0, (1, 2)), Row([4], 0, (3,))]))
    pair.run(make_step([Row([3], 30, (1, 2))]))
    pair.assert_same_cache()


@pytest.mark.parametrize("dtype", list(DenseType))
def test_dense_layers(dtype: DenseType) -> None:
    """A model whose attention input and gate are 16-bit matrices."""
    rng = np.random.default_rng(6)

    def dense(outputs: int, inputs: int) -> DenseWeight:
        values = (rng.standard_normal((outputs, inputs)) / 9).astype(np.float32)
        if dtype is DenseType.FLOAT16:
            return DenseWeight(values.astype(np.float16), dtype)
        return DenseWeight((values.view(np.uint32) >> 16).astype(np.uint16), dtype)

    ops = []
    for op in PROGRAM.ops:
        if isinstance(op, NormQuantize) and not op.wanted_only:
            op = replace(op, out="n")
        if isinstance(op, Linear) and op.out in ("qkv", "gate_up"):
            op = replace(op, x="n", weights=(dense(192 if op.out == "qkv" else 320, 96),))
        ops.append(op)
    buffers = (*PROGRAM.buffers, Buffer("n", 96))
    pair = Pair(replace(PROGRAM, ops=tuple(ops), buffers=buffers), RUNS["plain"])
    pair.run(make_step([Row(tokens(20), 0, (1, 2)), Row([4], 0, (3,))]))
    pair.run(make_step([Row([3], 20, (1, 2))]))
    pair.assert_same_cache()


def poisoned(out: str, occurrence: int, element: int) -> Program:
    """The tiny program with 2^97 in the bias of one linear layer."""
    ops, seen = [], 0
    for op in PROGRAM.ops:
        if isinstance(op, Linear) and op.out == out:
            if seen == occurrence:
                bias = np.zeros(sum(w.num_outputs for w in op.weights), np.float32)
                bias[element] = 2.0**97
                op = replace(op, bias=bias)
            seen += 1
        ops.append(op)
    return replace(PROGRAM, ops=tuple(ops))


@pytest.mark.parametrize(
    ("out", "occurrence", "element"),
    [
        ("qkv", 0, 5),
        ("qkv", 1, 100),
        ("qkv", 1, 190),
        ("x", 0, 3),
        ("gate_up", 1, 7),
        ("x", 3, 0),
        ("logits", 0, 9),
    ],
)
def test_the_first_non_finite_op_is_named(out: str, occurrence: int, element: int) -> None:
    """A value too large in queries, keys, values, residuals, gates or logits."""
    program = poisoned(out, occurrence, element)
    step = make_step([Row([1, 2, 3], 0, (0,)), Row([4], 0, (1,))])
    pair = Pair(program, RUNS["plain"])
    got, expected = pair.metal.run(step), pair.cpu.run(step)
    assert got.non_finite_ops.tolist() == expected.non_finite_ops.tolist()
    assert (expected.non_finite_ops >= 0).all()


def test_other_rows_do_not_notice_a_non_finite_one() -> None:
    """A bad row beside a good one: the good one's bits are those it has alone."""
    ops = list(PROGRAM.ops)
    first = ops[0]
    assert isinstance(first, Embed)
    embedding = first.weight
    assert isinstance(embedding, QuantizedWeight)
    scales = embedding.scales.copy()
    scales[5] = np.nan
    ops[0] = replace(first, weight=replace(embedding, scales=scales))
    program = replace(PROGRAM, ops=tuple(ops))
    good, bad = Row([1, 2, 3], 0, (0,)), Row([4, 5], 0, (1,))
    alone = metal_backend(program, RUNS["plain"]).run(make_step([good]))
    for rows in ([good, bad], [bad, good]):
        pair = Pair(program, RUNS["plain"])
        got, expected = pair.metal.run(make_step(rows)), pair.cpu.run(make_step(rows))
        at = rows.index(good)
        assert_same_bits(got.logits[at], alone.logits[0])
        assert got.non_finite_ops.tolist() == expected.non_finite_ops.tolist()
        assert got.non_finite_ops[at] == -1
        assert got.non_finite_ops[1 - at] == 1


def test_a_step_may_want_nothing() -> None:
    """A prefill chunk: only the cache matters."""
    pair = Pair(PROGRAM, RUNS["plain"])
    step = make_step([Row([1, 2, 3], 0, (0,), wanted=())])
    got, expected = pair.metal.run(step), pair.cpu.run(step)
    assert got.logits.shape[0] == expected.logits.shape[0] == 0
    assert got.non_finite_ops.tolist() == [-1]
    pair.assert_same_cache()


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [0, 1100, 2]},
        {"token_ids": [0, -1, 2]},
        {"positions": [0, 2, 3]},
        {"positions": [638, 639, 640]},
        {"positions": [-1, 0, 1]},
        {"positions": [30, 31, 32]},
        {"query_start_loc": [0, 2]},
        {"query_start_loc": [1, 3]},
        {"block_tables": [[64, 1]]},
        {"block_tables": [[-1, 1]]},
        {"positions": [15, 16, 17], "block_tables": [[3, 3]]},
        {"wanted": [3]},
        {"top_k": [1101]},
        {"top_k": [0]},
        {"inverse_temperatures": [np.nan]},
        {"inverse_temperatures": [-1.0]},
        {"quantiles": [1.0]},
        {"quantiles": [0.5, 0.5]},
        {"edit_starts": [0, 1]},
        {"edit_starts": [0, 1], "edit_ids": [1100], "edit_values": [1.0]},
        {"edit_starts": [0, 1], "edit_ids": [1], "edit_values": [np.inf]},
    ],
    ids=str,
)
def test_a_malformed_step_is_refused_by_the_same_rule(change: dict[str, Any]) -> None:
    """Nothing is written, and the message is the CPU backend's up to the value."""
    pair = Pair(PROGRAM, RUNS["plain"])
    good = make_step([Row([1, 2, 3], 0, (0, 1))])
    arrays = {k: np.asarray(v, getattr(good, k).dtype) for k, v in change.items()}
    step = make_step([Row([1, 2, 3], 0, (0, 1))], **arrays)
    with pytest.raises(ValueError, match=r"\[step\]") as expected:
        pair.cpu.run(step)
    rule = str(expected.value).split(", got")[0].split("; index")[0]
    with pytest.raises(ValueError, match=r"\[step\]") as refused:
        pair.metal.run(step)
    assert str(refused.value).startswith(rule)
    assert not any(pair.metal.read_block(b).any() for b in (0, 1, 3))


def test_a_block_is_put_back_in_another_place() -> None:
    """Blocks of the CPU's cache, too: both have one class."""
    pair = Pair(PROGRAM, RUNS["plain"])
    pair.run(make_step([Row([1] * 20, 0, (4, 9))]))
    for block, bits in ((30, pair.metal.read_block(4)), (3, pair.cpu.read_block(9))):
        pair.metal.write_block(block, bits)
        pair.cpu.write_block(block, bits)
        assert_same_bits(pair.metal.read_block(block), bits)
    pair.run(make_step([Row([2], 20, (30, 3))]))
    with pytest.raises(ValueError, match="block ids must lie in the pool"):
        pair.metal.write_block(10**6, pair.cpu.read_block(4))
    with pytest.raises(ValueError, match="bits must be uint16 of shape"):
        pair.metal.write_block(0, pair.cpu.read_block(4)[:1])


def test_a_closed_backend_runs_nothing() -> None:
    """Closing lets go of weights and cache."""
    backend = metal_backend(PROGRAM, RUNS["plain"])
    backend.close()
    with pytest.raises(ValueError, match="must be open"):
        backend.run(make_step([Row([1], 0, (0,))]))


def test_class_id_parts_agree() -> None:
    """The table's digest is the CPU backend's."""
    pair = Pair(PROGRAM)
    assert pair.metal.rope_digest == pair.cpu.rope_digest
    assert pair.metal.unit == "metal"
