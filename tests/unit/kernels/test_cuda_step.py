"""What the CUDA backend makes of a step before and after its launches; runs on any machine."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from isobatch_kernels import dispatch
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.logits import DeviceLogits
from isobatch_kernels.cuda.statistics import read_top_k
from isobatch_kernels.cuda.step_arrays import describe, views
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import Stat, StepInput
from isobatch_kernels.step_check import StepLimits, check_step

LIMITS = StepLimits(1100, 640, 40, 16, 4, 600)


def _step(**change: Any) -> StepInput:
    """A row of 70 tokens from 0, a row of 1 at 20, a row of 3 at 5."""
    lengths, starts = (70, 1, 3), (0, 20, 5)
    step = StepInput(
        token_ids=np.arange(74, dtype=np.int32),
        positions=np.concatenate(
            [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]
        ),
        query_start_loc=np.array([0, 70, 71, 74], np.int32),
        block_tables=np.array([[0, 1, 2, 3, 4], [5, 6, -1, -1, -1], [7, -1, -1, -1, -1]], np.int32),
        wanted=np.array([69, 73], np.int32),
        statistics=np.array([Stat.TOP_K | Stat.QUANTILE, Stat.ARGMAX], np.uint32),
        top_k=np.array([3, 9], np.int32),
        inverse_temperatures=np.array([1.0, 0.5], np.float32),
        quantiles=np.array([0.25, 0.75], np.float32),
        edit_starts=np.array([0, 1, 1], np.int32),
        edit_ids=np.array([3], np.int32),
        edit_values=np.array([-2.5], np.float32),
    )
    return replace(step, **change)


def test_views_take_a_step_apart() -> None:
    """Every number of the step comes back under its name."""
    step = _step()
    shape, numbers = describe(step, 16)
    parts = views(shape, mx.array(numbers))
    attention, statistics = parts.attention, parts.statistics
    assert (shape.tokens, shape.sequences, shape.singles, shape.parts) == (74, 3, 4, 2)
    assert (shape.table_width, shape.chunks, shape.repeats) == (8, 1, False)
    assert np.array(parts.token_ids).tolist() == step.token_ids.tolist()
    assert np.array(parts.blocks)[[0, 16, 69, 70, 71]].tolist() == [0, 1, 4, 6, 7]
    assert np.array(attention.rows).tolist() == [0] * 70 + [1] + [2] * 3
    assert np.array(attention.tokens).tolist() == [70, 71, 72, 73]
    assert np.array(attention.begins).tolist() == [0, 64]
    assert np.array(attention.counts).tolist() == [64, 6]
    assert np.array(attention.tables)[1].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert parts.wanted is not None
    assert np.array(parts.wanted).tolist() == [69, 73]
    assert np.array(statistics.counts).tolist() == [3, 0]
    assert np.array(statistics.inverse_temperatures).tolist() == [1.0, 0.5]
    assert np.array(statistics.quantiles).tolist() == [0.25, 0.75]
    assert np.array(statistics.edit_values).tolist() == [-2.5]


def test_steps_of_single_tokens_repeat() -> None:
    """Their launches are traced once; contexts grow by powers of two."""
    step = _step(
        token_ids=np.array([1, 2], np.int32),
        positions=np.array([255, 300], np.int32),
        query_start_loc=np.array([0, 1, 2], np.int32),
        block_tables=np.arange(40, dtype=np.int32).reshape(2, 20),
        wanted=np.array([0, 1], np.int32),
    )
    shape, _ = describe(step, 16)
    assert shape.repeats
    assert (shape.chunks, shape.table_width) == (2, 32)
    later, _ = describe(replace(step, positions=np.array([256, 301], np.int32)), 16)
    assert later == shape


BAD: list[dict[str, Any]] = [
    {"token_ids": np.full(74, 1100, np.int32)},
    {"query_start_loc": np.array([0, 70, 70, 74], np.int32)},
    {"query_start_loc": np.array([0, 70, 71, 73], np.int32)},
    {"query_start_loc": np.array([1, 70, 71, 74], np.int32)},
    {"positions": np.arange(570, 644, dtype=np.int32)},
    {"positions": np.zeros(74, np.int32)},
    {"block_tables": np.zeros((3, 5), np.int32)},
    {"block_tables": np.full((3, 5), 40, np.int32)},
    {"block_tables": np.array([[0, 1], [2, 3], [4, 5]], np.int32)},
    {"wanted": np.array([73, 69], np.int32)},
    {"wanted": np.array([0, 74], np.int32)},
    {"top_k": np.array([0, 9], np.int32)},
    {"inverse_temperatures": np.array([-1, 1], np.float32)},
    {"quantiles": np.array([0.5, 1.0], np.float32)},
    {"edit_starts": np.array([0, 1, 2], np.int32)},
    {"edit_ids": np.array([1100], np.int32)},
    {"edit_values": np.array([np.nan], np.float32)},
]


def test_a_right_step_passes() -> None:
    """Sharing a block that nobody writes is fine."""
    check_step(_step(), LIMITS)
    shared = np.array([[0, 1, 2, 3, 4], [9, 6, -1, -1, -1], [7, -1, -1, -1, -1]], np.int32)
    check_step(_step(block_tables=shared), LIMITS)


@pytest.mark.parametrize("change", BAD, ids=lambda change: next(iter(change)))
def test_what_the_native_engine_refuses_is_refused(change: dict[str, Any]) -> None:
    """Both checkers raise before anything is written."""
    step = _step(**change)
    with pytest.raises(ValueError, match=r"\[step\]"):
        check_step(step, LIMITS)
    program = tiny_program(np.random.default_rng(1))
    engine = CpuBackend(program, CpuLimits(40, 16, 4, 600, num_threads=1), unit="scalar")
    with pytest.raises(ValueError, match=r"\[step\]"):
        engine.run(step)


def test_top_k_entries_are_put_in_order() -> None:
    """Larger logit first, then the lower id; rows that did not ask have none."""
    ids = mx.array(np.array([[5, 2, 9], [0, 0, 0]], np.int32))
    logits = mx.array(np.array([[1.0, 2.0, 2.0], [0, 0, 0]], np.float32))
    weights = mx.array(np.array([[0.5, 1.0, 0.75], [0, 0, 0]], np.float32))
    top = read_top_k(_step(), [ids, logits, weights])
    assert top.starts.tolist() == [0, 3, 3]
    assert top.ids.tolist() == [2, 9, 5]
    assert top.logits.tolist() == [2.0, 2.0, 1.0]
    assert top.weights.tolist() == [1.0, 0.75, 0.5]


def test_logits_are_read_once_and_only_when_asked() -> None:
    """They look like an array."""
    logits = DeviceLogits(mx.array(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert (logits.shape, len(logits), logits.dtype) == ((2, 3), 2, np.dtype(np.float32))
    assert logits[[1]].tolist() == [[3.0, 4.0, 5.0]]
    assert np.asarray(logits).tobytes() == np.arange(6, dtype=np.float32).tobytes()
    assert logits.sum() == 15


def test_cuda_is_refused_without_a_device() -> None:
    """And nobody gets it unasked."""
    if mx.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU")
    program = tiny_program(np.random.default_rng(1))
    sizes: dict[str, Any] = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        dispatch.create_backend(program, backend="cuda", **sizes)
    assert dispatch.create_backend(program, **sizes).unit != "cuda"
