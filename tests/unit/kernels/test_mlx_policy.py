"""Policy mlx on the CPU: its results are near class X1's, and MLX's kernel there minds no rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from isobatch_kernels import dispatch  # noqa: E402
from isobatch_kernels.float_program import apply_policy  # noqa: E402
from isobatch_kernels.kernel_policy import KernelPolicy  # noqa: E402
from isobatch_kernels.program import (  # noqa: E402
    Buffer,
    DenseType,
    DenseWeight,
    Dimensions,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    PagedAttention,
    Program,
    QuantizedWeight,
    RopeSpec,
    RopeWriteKV,
    RowStatistics,
)
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step  # noqa: E402

SIZES: Any = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 640}
HIDDEN, HEADS, HEAD_DIM, VOCAB = 64, 4, 16, 90


def _weight(
    rng: np.random.Generator, n: int, k: int, bit: int = 4, group_size: int = 32
) -> QuantizedWeight:
    packed = rng.integers(0, 2**32, (n, k * bit // 32), dtype=np.uint32)
    scales = (rng.uniform(0.5, 1.5, (n, k // group_size)) / (1 << bit)).astype(np.float16)
    return QuantizedWeight(
        packed, scales, (scales * -(1 << (bit - 1))).astype(scales.dtype), bit, group_size
    )


def mlx_program(
    *,
    interleaved: bool = False,
    window: int = 0,
    rotary_dim: int = HEAD_DIM,
    group_size: int = 32,  # of the head's weight
) -> Program:
    """Two layers, the second with biases, and a dense output projection in the first."""
    rng = np.random.default_rng(3)
    ops: list[Any] = [Embed(_weight(rng, VOCAB, HIDDEN, 8), "x")]
    qkv = (HEADS + 4) * HEAD_DIM  # two key/value heads
    dense = rng.standard_normal((HIDDEN, HEADS * HEAD_DIM)).astype(np.float16) / 8
    for layer in range(2):
        norm = np.asarray(1 + 0.1 * rng.standard_normal(HIDDEN), np.float32)
        bias = np.asarray(rng.standard_normal(qkv), np.float32) if layer else None
        out: Any = _weight(rng, HIDDEN, HEADS * HEAD_DIM)
        if layer == 0:
            out = DenseWeight(dense.astype(np.float16), DenseType.FLOAT16)
        ops += [
            NormQuantize("x", norm, 1e-5, "a"),
            Linear("a", (_weight(rng, qkv, HIDDEN),), "qkv", bias=bias),
            RopeWriteKV("qkv", layer),
            PagedAttention("qkv", layer, "context", window),
            Linear("context", (out,), "x", residual="x"),
            NormQuantize("x", norm, 1e-5, "a"),
            Linear("a", (_weight(rng, 96, HIDDEN), _weight(rng, 96, HIDDEN)), "gate_up"),
            GateQuantize("gate_up", "inner"),
            Linear("inner", (_weight(rng, HIDDEN, 96, 8),), "x", residual="x"),
        ]
    ops += [
        NormQuantize("x", np.ones(HIDDEN, np.float32), 1e-5, "head", wanted_only=True),
        Linear("head", (_weight(rng, VOCAB, HIDDEN, 4, group_size),), "logits", wanted_only=True),
        RowStatistics("logits"),
    ]
    widths = {"x": HIDDEN, "a": HIDDEN, "qkv": qkv, "context": HEADS * HEAD_DIM,
              "gate_up": 192, "inner": 96, "head": HIDDEN, "logits": VOCAB}  # fmt: skip
    dims = Dimensions(HIDDEN, 2, HEADS, 2, HEAD_DIM, VOCAB, 256, HEAD_DIM**-0.5)
    return Program(
        dims, RopeSpec(10000.0, rotary_dim, interleaved),
        tuple(Buffer(name, width) for name, width in widths.items()), tuple(ops),
    )  # fmt: skip


def _mlx(program: Program) -> Any:
    return dispatch.create_backend(
        apply_policy(program, KernelPolicy("mlx")), backend="cpu", **SIZES
    )


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, count)]


@pytest.mark.parametrize(
    "change", [{}, {"interleaved": True}, {"window": 7}, {"rotary_dim": 8}],
    ids=["plain", "interleaved", "window", "partial"],
)  # fmt: skip
def test_it_is_near_the_native_float_classes(change: dict[str, Any]) -> None:
    """A prompt in two chunks beside another, then decoding: logits, statistics and cache."""
    program = mlx_program(**change)
    native = make_backend(apply_policy(program, KernelPolicy("gemm")), UNITS[0])
    mlx = _mlx(program)
    steps = [
        [Row(some_tokens(21), 0, (3, 5)), Row(some_tokens(4, 1), 0, (9,), wanted=(0, 3))],
        [Row(some_tokens(20, 2), 21, (3, 5, 7))],
        [Row([6], 41, (3, 5, 7)), Row([8], 4, (9,))],
    ]
    for rows in steps:
        one, other = (each.run(make_step(rows)) for each in (native, mlx))
        scale = float(np.abs(one.logits).max())
        np.testing.assert_allclose(other.logits, one.logits, atol=0.005 * scale)
        assert (other.argmax_ids == other.logits.argmax(axis=1)).all()
        assert (other.max_logits == other.logits.max(axis=1)).all()
        np.testing.assert_allclose(other.normalizers, one.normalizers, rtol=0.05)
        assert (other.quantile_ids >= 0).all()
        assert other.top_k_ids[0] == other.argmax_ids[0]
        assert (other.non_finite_ops == -1).all()
    for block in (3, 5, 7, 9, 11):
        one, other = (each.read_block(block).view(np.float16) for each in (native, mlx))
        assert one.shape == other.shape
        np.testing.assert_allclose(other.astype(np.float32), one.astype(np.float32), atol=0.02)
    mlx.zero_blocks(np.array([3, 5], np.int32))
    assert not mlx.read_block(3).any()
    assert mlx.read_block(7).any()
    mlx.write_block(3, mlx.read_block(7))
    assert (mlx.read_block(3) == mlx.read_block(7)).all()
    with pytest.raises(ValueError, match="bits must be uint16 of shape"):
        mlx.write_block(3, mlx.read_block(7)[:1])
    mlx.close()


def test_on_the_cpu_a_row_does_not_notice_the_batch() -> None:
    program = mlx_program()
    rows = [Row(some_tokens(3, i), 0, (2 * i,)) for i in range(6)]
    together = _mlx(program).run(make_step(rows))
    for i, row in enumerate(rows):
        alone = _mlx(program).run(make_step([row]))
        assert np.array_equal(bits(together.logits[i]), bits(alone.logits[0]))
    assert {each.path for each in together.paths if each.op == "linear"} == {"other"}
    assert {each.unit for each in together.paths} == {"mlx"}


def test_a_row_that_is_not_finite_names_an_op_and_stays_alone() -> None:
    program = mlx_program()
    weight = program.ops[0].weight  # type: ignore[union-attr]
    weight.scales[5] = np.nan  # type: ignore[union-attr]
    good, bad = Row([1, 2, 3], 0, (0,)), Row([4, 5], 0, (1,))
    alone = _mlx(program).run(make_step([good]))
    both = _mlx(program).run(make_step([bad, good]))
    assert both.non_finite_ops.tolist() == [0, -1]
    assert np.array_equal(bits(both.logits[1]), bits(alone.logits[0]))


def test_a_step_without_wanted_positions_fills_the_cache() -> None:
    backend = _mlx(mlx_program())
    step = make_step([Row(some_tokens(5), 0, (0,), wanted=())])
    output = backend.run(step)
    assert output.logits.shape == (0, VOCAB)
    assert backend.read_block(0).any()
    with pytest.raises(ValueError, match="block ids must lie in the pool"):
        backend.run(make_step([Row(some_tokens(5), 0, (99,))]))


def test_arrays_of_a_step_may_be_read_only() -> None:
    """Those decoded from a message are."""
    step = make_step([Row(some_tokens(5), 0, (0,))])
    expected = _mlx(mlx_program()).run(step)
    for each in dataclasses.fields(step):
        value = getattr(step, each.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    got = _mlx(mlx_program()).run(step)
    assert np.array_equal(bits(got.logits), bits(expected.logits))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="got 4 bits in groups of 16"):
        _mlx(mlx_program(group_size=16))
    floats = apply_policy(mlx_program(), KernelPolicy("mlx"))
    with pytest.raises(RuntimeError, match="needs MLX's kernels, got backend 'reference'"):
        dispatch.create_backend(floats, backend="reference", **SIZES)
