"""What the CUDA backend makes of a step before and after its launches; runs on any machine."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobatch_kernels import dispatch
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.create import cuda_is_available
from isobatch_kernels.cuda.logits import DeviceLogits
from isobatch_kernels.cuda.statistics import read_top_k
from isobatch_kernels.cuda.step_arrays import describe, offsets
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


def test_a_step_is_one_array() -> None:
    """Every number of the step is where its launches look for it."""
    step = _step(token_sources=np.array([*[-1] * 73, 1], np.int32))
    shape, numbers = describe(step, 16)
    begins = offsets(shape)
    assert len(numbers) == begins["end"]

    def piece(name: str, count: int) -> Any:
        return numbers[begins[name] : begins[name] + count]

    assert (shape.tokens, shape.sequences, shape.singles, shape.parts) == (74, 3, 4, 2)
    assert (shape.table_width, shape.chunks, shape.edits, shape.stride) == (8, 1, 1, 4)
    assert shape.sums
    assert shape.sourced
    assert begins["token_ids"] == 0
    assert piece("token_ids", 74).tolist() == step.token_ids.tolist()
    assert piece("blocks", 74)[[0, 16, 69, 70, 71]].tolist() == [0, 1, 4, 6, 7]
    assert piece("rows", 74).tolist() == [0] * 70 + [1] + [2] * 3
    assert piece("singles", 4).tolist() == [70, 71, 72, 73]
    assert piece("single_positions", 4).tolist() == [20, 5, 6, 7]
    assert piece("single_rows", 4).tolist() == [1, 2, 2, 2]
    assert piece("begins", 2).tolist() == [0, 64]
    assert piece("counts", 2).tolist() == [64, 6]
    assert piece("tables", 24).reshape(3, 8)[1].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert piece("wanted", 2).tolist() == [69, 73]
    assert piece("top_counts", 2).tolist() == [3, 0]
    assert piece("by_quantile", 2).tolist() == [1, 0]
    assert piece("edit_starts", 3).tolist() == [0, 1, 1]
    assert piece("edit_ids", 1).tolist() == [3]
    assert piece("inverse_temperatures", 2).view(np.float32).tolist() == [1.0, 0.5]
    assert piece("quantiles", 2).view(np.float32).tolist() == [0.25, 0.75]
    assert piece("edit_values", 1).view(np.float32).tolist() == [-2.5]
    assert piece("sources", 74).tolist() == [-1] * 73 + [1]


def test_steps_of_single_tokens_repeat() -> None:
    """Contexts, edits and top K grow by powers of two, so that graphs are found again."""
    step = _step(
        token_ids=np.array([1, 2], np.int32),
        positions=np.array([255, 300], np.int32),
        query_start_loc=np.array([0, 1, 2], np.int32),
        block_tables=np.arange(40, dtype=np.int32).reshape(2, 20),
        wanted=np.array([0, 1], np.int32),
        edit_starts=np.array([0, 1, 3], np.int32),
        edit_ids=np.array([3, 4, 5], np.int32),
        edit_values=np.array([1, 2, 3], np.float32),
    )
    shape, numbers = describe(step, 16)
    assert (shape.chunks, shape.table_width, shape.edits, shape.sourced) == (2, 32, 4, False)
    at = offsets(shape)["edit_values"]
    assert numbers[at : at + 4].view(np.float32).tolist() == [1, 2, 3, 0]
    later = replace(
        step,
        positions=np.array([256, 301], np.int32),
        top_k=np.array([4, 1], np.int32),
        edit_starts=np.array([0, 4, 4], np.int32),
        edit_ids=np.zeros(4, np.int32),
        edit_values=np.zeros(4, np.float32),
        token_sources=np.array([-1, -1], np.int32),
    )
    assert describe(later, 16)[0] == shape


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
    ids = np.array([[5, 2, 9, 7], [0, 0, 0, 0]], np.int32)
    logits = np.array([[1.0, 2.0, 2.0, 8.0], [0, 0, 0, 0]], np.float32)
    weights = np.array([[0.5, 1.0, 0.75, 0], [0, 0, 0, 0]], np.float32)
    words = np.concatenate([ids, logits.view(np.int32), weights.view(np.int32)]).reshape(-1)
    top = read_top_k(_step(), words, 4)
    assert top.starts.tolist() == [0, 3, 3]
    assert top.ids.tolist() == [2, 9, 5]
    assert top.logits.tolist() == [2.0, 2.0, 1.0]
    assert top.weights.tolist() == [1.0, 0.75, 0.5]


def test_logits_are_read_once_and_only_when_asked() -> None:
    """They look like an array."""
    reads = []

    def copy(values: Any) -> None:
        reads.append(1)
        values[:] = np.arange(6, dtype=np.float32).reshape(2, 3)

    logits = DeviceLogits((2, 3), copy)
    assert (logits.shape, len(logits), logits.dtype) == ((2, 3), 2, np.dtype(np.float32))
    assert reads == []
    assert logits[[1]].tolist() == [[3.0, 4.0, 5.0]]
    assert np.asarray(logits).tobytes() == np.arange(6, dtype=np.float32).tobytes()
    assert logits.sum() == 15
    assert reads == [1]


def test_cuda_is_refused_without_a_device() -> None:
    """And nobody gets it unasked."""
    if cuda_is_available():
        pytest.skip("this machine has an NVIDIA GPU")
    program = tiny_program(np.random.default_rng(1))
    sizes: dict[str, Any] = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        dispatch.create_backend(program, backend="cuda", **sizes)
    assert dispatch.create_backend(program, **sizes).unit != "cuda"
