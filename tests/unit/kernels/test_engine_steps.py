"""What the engine refuses, counts and keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isobatch_kernels.program import (
    AllGather,
    Buffer,
    DenseType,
    DenseWeight,
    Dimensions,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Observe,
    Program,
    QuantizedWeight,
    RopeSpec,
    RowStatistics,
)
from isobatch_kernels.self_test import random_weight, tiny_program
from isobatch_kernels.step import Stat
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
FASTEST = UNITS[-1]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"token_ids": [0, 1100, 2]}, "token ids must lie in the vocabulary, got 1100"),
        ({"token_ids": [0, -1, 2]}, "token ids must lie in the vocabulary, got -1"),
        ({"positions": [0, 2, 3]}, "positions of a row must be consecutive, got 2"),
        ({"positions": [638, 639, 640]}, "positions must lie in the context, got 640"),
        ({"positions": [-1, 0, 1]}, "positions must not be negative, got -1"),
        ({"positions": [30, 31, 32]}, "block_tables must hold the blocks of every position"),
        ({"query_start_loc": [0, 2]}, "query_start_loc must end with the number of tokens"),
        ({"query_start_loc": [1, 3]}, "query_start_loc must begin with 0"),
        ({"block_tables": [[64, 1]]}, "block ids must lie in the pool, got 64"),
        ({"block_tables": [[-1, 1]]}, "block ids must lie in the pool, got -1"),
        ({"positions": [15, 16, 17], "block_tables": [[3, 3]]}, "belong to one row alone, got 3"),
        ({"wanted": [3]}, "wanted positions must be indexes of tokens, got 3"),
        ({"top_k": [1101]}, "top_k must be 1 to the vocabulary size, got 1101"),
        ({"top_k": [0]}, "top_k must be 1 to the vocabulary size, got 0"),
        ({"inverse_temperatures": [np.nan]}, "inverse temperatures must be finite"),
        ({"quantiles": [1.0]}, "quantiles must be at least 0 and below 1"),
        ({"quantiles": [0.5, 0.5]}, "quantiles must have 1 entries, got 2"),
        ({"edit_starts": [0, 1]}, "edit_starts must end with the number of edits"),
        (
            {"edit_starts": [0, 1], "edit_ids": [1100], "edit_values": [1.0]},
            "edited ids must lie in the vocabulary",
        ),
    ],
)
def test_a_malformed_step_is_refused_before_anything_is_written(
    change: dict[str, Any], rule: str
) -> None:
    """The cache stays as it was and the next step works."""
    backend = make_backend(PROGRAM, FASTEST)
    good = make_step([Row([1, 2, 3], 0, (0, 1))])
    arrays = {k: np.asarray(v, getattr(good, k).dtype) for k, v in change.items()}
    with pytest.raises(ValueError, match=rule):
        backend.run(make_step([Row([1, 2, 3], 0, (0, 1))], **arrays))
    assert not any(backend.read_block(b).any() for b in (0, 1, 3))
    assert backend.run(good).non_finite_ops.tolist() == [-1]


def test_a_block_written_by_one_row_and_seen_by_another_is_refused() -> None:
    """Sharing is for full blocks that nobody writes."""
    backend = make_backend(PROGRAM, FASTEST)
    shared = [Row([1], 20, (0, 1)), Row([2], 20, (0, 2))]
    backend.run(make_step(shared))
    with pytest.raises(ValueError, match="belong to one row alone, got 1"):
        backend.run(make_step([Row([1], 20, (0, 1)), Row([2], 20, (1, 2))]))


def test_a_step_must_fit_the_limits() -> None:
    """Tokens and rows."""
    backend = make_backend(PROGRAM, FASTEST, max_num_batched_tokens=4, max_num_seqs=2)
    with pytest.raises(ValueError, match="max_num_batched_tokens, got 5"):
        backend.run(make_step([Row([1] * 5, 0, (0,))]))
    with pytest.raises(ValueError, match="max_num_seqs, got 3"):
        backend.run(make_step([Row([1], 0, (i,)) for i in range(3)]))


def test_statistics_that_are_not_asked_for_stay_empty() -> None:
    """Zero normaliser, quantile -1, no top-K; the argmax always."""
    backend = make_backend(PROGRAM, FASTEST)
    rows = [Row([1], 0, (0,)), Row([2], 0, (1,))]
    asked = np.array([Stat.ARGMAX, Stat.TOP_K], np.uint32)
    output = backend.run(make_step(rows, statistics=asked))
    assert output.normalizers.tolist() == [0, 0]
    assert output.quantile_ids.tolist() == [-1, -1]
    assert output.top_k_starts.tolist() == [0, 0, 7]
    assert output.argmax_ids.tolist() == output.logits.argmax(axis=1).tolist()
    assert output.top_k_ids[0] == output.argmax_ids[1]


def test_a_step_may_want_nothing() -> None:
    """A prefill chunk: only the cache matters."""
    backend = make_backend(PROGRAM, FASTEST)
    output = backend.run(make_step([Row([1, 2, 3], 0, (0,), wanted=())]))
    assert output.logits.shape[0] == 0
    assert backend.read_block(0)[:, :, :, :3].any()
    assert not any(p.op == "row_statistics" for p in output.paths)


def test_blocks_are_zeroed_and_read_back() -> None:
    """Only the ones named; ids are checked."""
    backend = make_backend(PROGRAM, FASTEST)
    backend.run(make_step([Row([1] * 20, 0, (4, 9))]))
    kept = backend.read_block(9)
    backend.zero_blocks(np.array([4], np.int32))
    assert not backend.read_block(4).any()
    assert (backend.read_block(9) == kept).all()
    assert kept.shape == (2, 2, 2, 16, 24)
    for call in (
        backend.read_block,
        lambda b: backend.zero_blocks(np.array([b], np.int32)),
        lambda b: backend.write_block(b, kept),
    ):
        with pytest.raises(ValueError, match="block ids must lie in the pool, got 64"):
            call(64)


def test_the_next_step_clears_blocks_before_it_writes_there() -> None:
    """Also one that follows a step that was refused."""
    backend = make_backend(PROGRAM, FASTEST)
    backend.run(make_step([Row([1] * 32, 0, (4, 9))]))
    kept = backend.read_block(9)
    backend.zero_blocks(np.array([4, 4], np.int32))
    with pytest.raises(ValueError, match="block ids must lie in the pool"):
        backend.run(make_step([Row([1], 0, (64,))]))
    backend.run(make_step([Row([1], 0, (4,))]))
    block = backend.read_block(4)
    assert block[:, :, :, :1].any(axis=(2, 4)).all()
    assert not block[:, :, :, 1:].any()
    assert (backend.read_block(9) == kept).all()


def test_what_is_put_in_a_cleared_block_stays() -> None:
    backend = make_backend(PROGRAM, FASTEST)
    backend.run(make_step([Row([1] * 16, 0, (4,))]))
    kept = backend.read_block(4)
    backend.zero_blocks(np.array([7], np.int32))
    backend.write_block(7, kept)
    backend.run(make_step([Row([2], 0, (5,))]))
    assert (backend.read_block(7) == kept).all()


def test_blocks_may_be_cleared_for_ever_without_a_step() -> None:
    """More than the pool has, one at a time."""
    backend = make_backend(PROGRAM, FASTEST)
    backend.run(make_step([Row([1] * 16, 0, (4,))]))
    for block in (*range(64), *range(64)):
        backend.zero_blocks(np.array([block], np.int32))
    backend.run(make_step([Row([2], 0, (5,))]))
    assert not backend.read_block(4).any()


def test_a_block_is_put_back_in_another_place() -> None:
    """The next step reads it there, and its results are those of the place it came from."""
    backend = make_backend(PROGRAM, FASTEST)
    backend.run(make_step([Row([1] * 20, 0, (4, 9))]))
    kept = [backend.read_block(block) for block in (4, 9)]
    expected = backend.run(make_step([Row([2], 20, (4, 9))])).logits.tobytes()
    other = make_backend(PROGRAM, FASTEST)
    for block, contents in zip((30, 3), kept, strict=True):
        other.write_block(block, contents)
        assert (other.read_block(block) == contents).all()
    assert not other.read_block(4).any()
    assert other.run(make_step([Row([2], 20, (30, 3))])).logits.tobytes() == expected
    with pytest.raises(ValueError, match="bits must be uint16 of shape"):
        other.write_block(0, kept[0][:1])


@pytest.mark.parametrize(
    ("count", "path"), [(1, "gemv"), (2, "gemv_multi"), (16, "gemv_multi"), (17, "gemm")]
)
def test_paths_are_counted_by_rows(count: int, path: str) -> None:
    """Linear layers by tokens, the head by wanted positions, attention by row length."""
    backend = make_backend(PROGRAM, FASTEST)
    rows = [Row([1], 0, (0,))]
    if count > 1:
        rows.append(Row([1] * (count - 1), 0, (1, 2), wanted=()))
    paths = backend.run(make_step(rows)).paths
    linears = {(p.path, p.dispatches, p.rows) for p in paths if p.op == "linear"}
    assert linears == {(path, 8, 8 * count), ("gemv", 1, 1)}
    assert all(p.unit == FASTEST for p in paths)
    attention = {p.path: p.rows // p.dispatches for p in paths if p.op == "paged_attention"}
    decode = 2 if count == 2 else 1
    expected = {"attention_decode": decode, "attention_prefill": count - decode}
    assert attention == {k: v for k, v in expected.items() if v}


def test_a_closed_backend_says_so() -> None:
    """Closing frees the engine; a second close is harmless."""
    backend = make_backend(PROGRAM, FASTEST)
    backend.close()
    backend.close()
    with pytest.raises(ValueError, match="must be open"):
        backend.run(make_step([Row([1], 0, (0,))]))


def dense_program(kind: DenseType) -> Program:
    """Dense layers, a layer of several formats, fp32 norms and gates, ops that do nothing."""
    rng = np.random.default_rng(3)

    def dense(outputs: int, inputs: int) -> DenseWeight:
        values = rng.standard_normal((outputs, inputs)).astype(np.float32)
        if kind is DenseType.BFLOAT16:
            return DenseWeight((values.view(np.uint32) >> 16).astype(np.uint16), kind)
        return DenseWeight(values.astype(np.float16), kind)

    def quantized(outputs: int, bits: int, group: int, half: bool) -> QuantizedWeight:
        return random_weight(rng, outputs, 64, bits, group, half=half)

    merged = (
        quantized(33, 4, 32, True),
        quantized(7, 4, 32, True),
        quantized(20, 8, 32, True),
        quantized(4, 4, 16, False),
    )
    ones = np.ones(64, np.float32)
    ops = (
        Embed(dense(50, 64), "x"),
        NormQuantize("x", ones, 1e-5, "normed"),
        Linear("normed", (dense(100, 64), dense(28, 64)), "wide"),
        GateQuantize("wide", "gated"),
        Linear("gated", (dense(64, 64),), "x", residual="x"),
        AllGather("x"),
        NormQuantize("x", ones, 1e-5, "a"),
        Linear("a", merged, "y", bias=rng.standard_normal(64).astype(np.float32), residual="x"),
        Observe("y", "after"),
        NormQuantize("y", ones, 1e-5, "last", wanted_only=True),
        Linear("last", (dense(50, 64),), "logits", wanted_only=True),
        RowStatistics("logits"),
    )
    buffers = (
        *(Buffer(name, 64) for name in ("x", "normed", "gated", "y", "last")),
        Buffer("wide", 128),
        Buffer("a", 64, 32, half_sums=True),
        Buffer("logits", 50),
    )
    dims = Dimensions(64, 1, 2, 1, 32, 50, 64, 1.0)
    return Program(dims, RopeSpec(10000.0, 32, interleaved=True), buffers, ops)


@pytest.mark.parametrize("kind", list(DenseType))
@pytest.mark.parametrize("unit", UNITS)
def test_dense_layers_and_mixed_formats_equal_the_reference(unit: str, kind: DenseType) -> None:
    """For one row and for many, each row as it is alone."""
    program = dense_program(kind)
    rows = [Row([t], 0, (t,)) for t in range(3, 9)]
    expected = bits(make_backend(program, "reference").run(make_step(rows)).logits).copy()
    together = make_backend(program, unit, threads=2)
    assert (bits(together.run(make_step(rows)).logits) == expected).all()
    for i, row in enumerate(rows):
        assert (bits(together.run(make_step([row])).logits[0]) == expected[i]).all()


def weight(outputs: int, inputs: int) -> QuantizedWeight:
    return random_weight(np.random.default_rng(0), outputs, inputs, 4, 32, half=True)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"ops": (Embed(weight(9, 64), "x"),)}, "cover the vocabulary"),
        ({"ops": (Linear("a", (weight(9, 96),), "x"),)}, "as wide as its weight's inputs"),
        ({"ops": (Linear("a", (weight(9, 64),), "x"),)}, "as wide as the weights' outputs"),
        ({"ops": (Linear("a", (weight(64, 64),), "b"),)}, "known buffers, got 'b'"),
        ({"ops": (Linear("x", (weight(64, 64),), "x"),)}, "quantised x"),
        (
            {"ops": (Linear("a", (weight(64, 64),), "x", policy="fast"),)},
            "policy must be exact, gemv, gemm or threshold",
        ),
        ({"buffers": (Buffer("a", 64, 48),)}, "32 or 64 elements, got 48"),
    ],
)
def test_a_malformed_program_is_refused(change: dict[str, Any], rule: str) -> None:
    """At construction, with the rule."""
    parts: dict[str, Any] = {
        "dimensions": Dimensions(64, 1, 2, 1, 32, 50, 64, 1.0),
        "rope": RopeSpec(10000.0, 32, interleaved=True),
        "buffers": (Buffer("x", 64), Buffer("a", 64, 32)),
        "ops": (),
    } | change
    with pytest.raises(ValueError, match=rule):
        make_backend(Program(**parts), FASTEST)
