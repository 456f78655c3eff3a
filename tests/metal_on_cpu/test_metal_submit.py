"""A step that is submitted while the one before it runs: the bytes, and what MLX copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal_backend import MetalBackend, MetalLimits
from isobatch_kernels.program import Embed, Linear, Program, QuantizedWeight
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import Stat, StepInput, StepOutput
from tests.metal_on_cpu.backends import FIELDS, Pair, metal_backend, rope_table
from tests.metal_on_cpu.cases.common import assert_same_bits
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.lazy import CountingArrays, lazy_factory
from tests.support.kernel_programs import Row, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
STAGED = MetalProfile(layers_per_stage=1)
FACTORY = EmulatedKernelFactory()
GREEDY, DRAWN = Stat.ARGMAX, Stat.ARGMAX | Stat.QUANTILE
PROMPTS = ([5, 9, 1000], [7], [3, 4])


def prompts(statistics: Sequence[int] = (GREEDY, DRAWN, GREEDY)) -> StepInput:
    """Three sequences; the last one's prompt goes on in the next step."""
    rows = [Row(p, 0, (2 * i, 2 * i + 1)) for i, p in enumerate(PROMPTS)]
    # So flat that a draw is seldom the argmax.
    flat = np.full(3, 0.02, np.float32)
    return make_step(rows, statistics=np.array(statistics, np.uint32), inverse_temperatures=flat)


def continued(tokens: tuple[int, int], sources: tuple[int, int]) -> StepInput:
    """The first two go on with a token each, the third with three more of its prompt."""
    rows = [
        Row([tokens[0]], 3, (0, 1)), Row([8, 2, 6], 2, (4, 5)), Row([tokens[1]], 1, (2, 3))
    ]  # fmt: skip
    at = np.array([sources[0], -1, -1, -1, sources[1]], np.int32)
    return make_step(rows, token_sources=at)


def chosen(step: StepInput, output: StepOutput) -> list[int]:
    drawn = (step.statistics & Stat.QUANTILE) != 0
    return [int(t) for t in np.where(drawn, output.quantile_ids, output.argmax_ids)]


def assert_same(got: StepOutput, expected: StepOutput) -> None:
    for name in FIELDS:
        assert_same_bits(getattr(got, name), getattr(expected, name), name)


@pytest.mark.parametrize("drawn", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("mlx", [False, True], ids=["numpy", "mlx"])
def test_two_submitted_steps_are_two_steps(drawn: tuple[int, int], mlx: bool) -> None:
    """Greedy and drawn tokens of the step before, beside a prompt: bytes of one after another."""
    pair = Pair(PROGRAM, FACTORY, mlx=mlx, profile=STAGED)
    asked = [DRAWN if d else GREEDY for d in drawn]
    first = prompts([asked[0], asked[1], GREEDY])
    expected = pair.cpu.run(first)
    tokens = chosen(first, expected)
    # All differ, or taking another one would not show.
    known = {*expected.argmax_ids[:2].tolist(), *expected.quantile_ids[:2].tolist()} - {-1}
    assert len(known) == 2 + sum(drawn)
    submitted = pair.metal.submit(first), pair.metal.submit(continued((0, 0), (0, 1)))
    assert [each.is_running for each in submitted] == [True, True]
    assert_same(submitted[0].finish(), expected)
    expected = pair.cpu.run(continued((tokens[0], tokens[1]), (-1, -1)))
    assert_same(submitted[1].finish(), expected)
    # The step before may have been finished by then.
    last = make_step([Row([0], 4, (0, 1))], token_sources=np.array([2], np.int32))
    literal = make_step([Row([chosen_of_last(expected)], 4, (0, 1))])
    assert_same(pair.metal.submit(last).finish(), pair.cpu.run(literal))
    pair.assert_same_cache()


def chosen_of_last(output: StepOutput) -> int:
    return int(output.quantile_ids[2])


def poisoned() -> Program:
    """The tiny program in which token 5 is not a number."""
    ops = list(PROGRAM.ops)
    first = ops[0]
    assert isinstance(first, Embed)
    embedding = first.weight
    assert isinstance(embedding, QuantizedWeight)
    scales = embedding.scales.copy()
    scales[5] = np.nan
    ops[0] = replace(first, weight=replace(embedding, scales=scales))
    return replace(PROGRAM, ops=tuple(ops))


def test_a_row_that_is_not_finite_disturbs_no_step_behind_it() -> None:
    """Its op is named though the next step was submitted, has its blocks, and feeds on its token.

    The row with token 5 ended, and its blocks were cleared and given to another sequence.
    """
    pair = Pair(poisoned(), FACTORY, profile=STAGED)
    first = prompts()
    second = make_step(
        [
            *(Row([8, 2, 6], 2, (4, 5)), Row([0], 1, (2, 3))),
            *(Row([11, 12], 0, (0, 1)), Row([0], 0, (9,))),
        ],
        token_sources=np.array([-1, -1, -1, 1, -1, -1, 0], np.int32),
    )
    a = pair.metal.submit(first)
    pair.metal.zero_blocks(np.array([0, 1, 9], np.int32))
    b = pair.metal.submit(second)
    expected = pair.cpu.run(first)
    got = a.finish()
    assert got.non_finite_ops.tolist() == expected.non_finite_ops.tolist() == [1, -1, -1]
    for row in (1, 2):
        assert_same_bits(got.logits[row], expected.logits[row])
    pair.cpu.zero_blocks(np.array([0, 1, 9], np.int32))
    ids = second.token_ids.copy()
    ids[3] = chosen(first, expected)[1]
    literal = replace(second, token_ids=ids, token_sources=np.zeros(0, np.int32))
    got, expected = b.finish(), pair.cpu.run(literal)
    # The last row has any token, because the row that it continues was not finite.
    for row in (0, 1, 2):
        assert_same_bits(got.logits[row], expected.logits[row])
    for block in (b for b in range(64) if b != 9):
        assert_same_bits(pair.metal.read_block(block), pair.cpu.read_block(block))


def with_large_bias(out: str, occurrence: int) -> Program:
    ops, seen = [], 0
    for op in PROGRAM.ops:
        if isinstance(op, Linear) and op.out == out:
            if seen == occurrence:
                bias = np.zeros(sum(w.num_outputs for w in op.weights), np.float32)
                bias[3] = 2.0**97
                op = replace(op, bias=bias)
            seen += 1
        ops.append(op)
    return replace(PROGRAM, ops=tuple(ops))


@pytest.mark.parametrize(("out", "occurrence"), [("qkv", 1), ("x", 1), ("logits", 0)])
def test_the_first_op_is_named_for_both_of_two_steps(out: str, occurrence: int) -> None:
    """A re-run of either step leaves the cache as it is without re-runs in between."""
    program = with_large_bias(out, occurrence)
    pair, alone = Pair(program, FACTORY, profile=STAGED), metal_backend(program, FACTORY)
    steps = prompts(), continued((4, 4), (-1, -1))
    submitted = [pair.metal.submit(step) for step in steps]
    for each, step in zip(submitted, steps, strict=True):
        expected = pair.cpu.run(step).non_finite_ops
        assert (expected >= 0).all()
        assert each.finish().non_finite_ops.tolist() == expected.tolist()
        alone.run(step)
    for block in range(6):
        assert_same_bits(pair.metal.read_block(block), alone.read_block(block))


def test_blocks_are_put_back_while_a_step_runs() -> None:
    """What was put back is there for the next step and for whoever reads it before."""
    pair = Pair(PROGRAM, FACTORY, profile=STAGED)
    pair.run(prompts())
    bits = pair.cpu.read_block(0)
    running = pair.metal.submit(continued((4, 4), (-1, -1)))
    for backend in (pair.metal, pair.cpu):
        backend.zero_blocks(np.array([30, 31], np.int32))
        backend.write_block(30, bits)
        backend.write_block(33, bits)
    assert_same_bits(pair.metal.read_block(33), bits)
    after = make_step([Row([6], 3, (30, 31))])
    behind = pair.metal.submit(after)
    assert_same(running.finish(), pair.cpu.run(continued((4, 4), (-1, -1))))
    assert_same(behind.finish(), pair.cpu.run(after))
    pair.assert_same_cache()


def test_the_order_of_submitting_and_finishing_is_kept() -> None:
    backend = metal_backend(PROGRAM, FACTORY)
    steps = [backend.submit(prompts()) for _ in range(2)]
    with pytest.raises(ValueError, match="at most 2 steps may be pending"):
        backend.submit(prompts())
    with pytest.raises(ValueError, match="once and in order"):
        steps[1].finish()
    steps[0].finish()
    with pytest.raises(ValueError, match="once and in order"):
        steps[0].finish()
    steps[1].finish()


@pytest.mark.parametrize("sources", [[3], [0, 0], [0]], ids=str)
def test_sources_must_be_there(sources: list[int]) -> None:
    """Three wanted positions before, or none; nothing is written."""
    backend = metal_backend(PROGRAM, FACTORY)
    if sources != [0]:
        backend.run(prompts())
    step = make_step([Row([0], 0, (20,))], token_sources=np.array(sources, np.int32))
    with pytest.raises(ValueError, match="token_sources must be one a token"):
        backend.submit(step)
    assert not backend.read_block(20).any()


def lazy_backend() -> tuple[MetalBackend, CountingArrays, int]:
    """Two layers over a pool far larger than anything else, and the bytes of a layer's pool."""
    arrays = CountingArrays()
    backend = MetalBackend(
        PROGRAM,
        MetalLimits(1024, 16, 8, 640),
        kernel_factory=lazy_factory,
        arrays=arrays,
        rope_table=rope_table(PROGRAM),
        profile=STAGED,
    )
    layer = PROGRAM.dimensions.num_kv_heads * PROGRAM.dimensions.head_dim * 2 * 2 * 16 * 1024
    return backend, arrays, layer


def test_nothing_is_read_while_steps_are_submitted() -> None:
    """The first step never waits; the second only for stages of the first, to write in place."""
    backend, arrays, _ = lazy_backend()
    first = backend.submit(prompts())
    assert (arrays.waits, arrays.reads) == (0, 0)
    second = backend.submit(continued((0, 0), (0, 1)))
    assert (arrays.waits, arrays.reads) == (2, 0)
    first.finish()
    second.finish()


@pytest.fixture
def on_mlx_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)


@pytest.mark.usefixtures("on_mlx_cpu")
def test_the_cache_is_written_in_place() -> None:
    """Two steps under way, blocks cleared, put back and read between: no pool is ever copied."""
    backend, _, layer_bytes = lazy_backend()
    backend.run(prompts())
    kept = backend.read_block(0)
    mx.synchronize()
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    pending = [backend.submit(prompts())]
    for i in range(4):
        backend.zero_blocks(np.array([100 + i, 200 + i], np.int32))
        backend.write_block(200 + i, kept)
        assert not backend.read_block(300 + i).any()
        pending.append(backend.submit(continued((0, 0), (0, 1))))
        pending.pop(0).finish()
    pending.pop().finish()
    assert mx.get_peak_memory() - base < layer_bytes / 2
    assert mx.get_active_memory() - base < layer_bytes / 2
