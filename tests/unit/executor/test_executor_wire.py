"""Messages to values and back: dtypes, lengths, what may be left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executor_service import wire
from executor_service.engine.step_check import check_step
from executor_service.engine.step_request import (
    Outcome,
    RowOutcome,
    StepAnswer,
)
from executor_service.errors import InvalidRequestError, InvalidStepError
from executor_service.kv_cache.manager import KvOccupancy
from executor_service.metrics import PATHS
from isobatch.executor.v1 import token_rows_pb2 as pb
from isobatch_kernels.step import Stat
from tests.support.steps import LIMITS, step_results


def _pack(dtype: str, *values: float) -> bytes:
    return np.array(values, dtype).tobytes()


def _step(**changes: Any) -> pb.Step:
    """Two rows, three tokens, two wanted positions."""
    fields: dict[str, Any] = {
        "step_id": 5,
        "row_sequence_ids": _pack("<u8", 2**63 + 1, 4),
        "row_generations": _pack("<u4", 0, 2**32 - 1),
        "row_start_positions": _pack("<i4", 0, 3),
        "row_num_tokens": _pack("<i4", 2, 1),
        "token_ids": _pack("<i4", 7, 8, 9),
        "wanted_token_indexes": _pack("<i4", 1, 2),
        "wanted_statistics": _pack("<u4", 1, 8),
        "wanted_top_k": _pack("<i4", 0, 0),
        "wanted_inverse_temperatures": _pack("<f4", 1, 1.25),
        "wanted_quantiles": _pack("<f4", 0, 0.5),
    }
    return pb.Step(**(fields | changes))


def test_reads_a_step() -> None:
    request = wire.read_step(_step(released_sequence_ids=_pack("<u8", 3)))
    check_step(request, LIMITS)
    assert request.sequence_ids.tolist() == [2**63 + 1, 4]
    assert request.generations.tolist() == [0, 2**32 - 1]
    assert request.released.tolist() == [3]
    assert request.sources.tolist() == [1, 1]
    assert request.source_steps.tolist() == [0, 0]
    assert request.inverse_temperatures.tolist() == [1, 1.25]
    assert request.named_starts.tolist() == request.edit_starts.tolist() == [0, 0, 0]


def test_steps_that_differ_in_tokens_share_the_other_arrays() -> None:
    first = wire.read_step(_step())
    again = wire.read_step(_step(token_ids=_pack("<i4", 1, 2, 3)))
    other = wire.read_step(_step(wanted_top_k=_pack("<i4", 2, 4)))
    for name in ("sequence_ids", "num_tokens", "sources", "wanted", "statistics", "edit_starts"):
        assert getattr(again, name) is getattr(first, name)
        assert not getattr(again, name).flags.writeable
    assert again.token_ids.tolist() == [1, 2, 3]
    assert other.top_k.tolist() == [2, 4]
    assert other.statistics.tolist() == first.statistics.tolist()


def test_reads_a_step_of_releases_alone() -> None:
    request = wire.read_step(pb.Step(step_id=1, released_sequence_ids=_pack("<u8", 3)))
    check_step(request, LIMITS)
    assert len(request.sequence_ids) == len(request.wanted) == 0


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("row_sequence_ids", b"1234567", "whole elements of 8 bytes, got 7 bytes"),
        ("row_generations", _pack("<u4", 0), "must have 2 elements, got 1"),
        ("row_start_positions", _pack("<i4", 0, 0, 0), "must have 2 elements, got 3"),
        ("row_num_tokens", b"", "must have 2 elements, got 0"),
        ("row_token_sources", b"\x01", "must have 2 elements, got 1"),
        ("row_source_steps", _pack("<u8", 0), "must have 2 elements, got 1"),
        ("token_ids", b"123", "whole elements of 4 bytes, got 3 bytes"),
        ("wanted_statistics", b"", "must have 2 elements, got 0"),
        ("wanted_top_k", _pack("<i4", 0), "must have 2 elements, got 1"),
        ("wanted_inverse_temperatures", b"", "must have 2 elements, got 0"),
        ("wanted_quantiles", _pack("<f4", 0), "must have 2 elements, got 1"),
        ("named_starts", _pack("<i4", 0, 0), "must have 3 elements, got 2"),
        ("edit_starts", _pack("<i4", 0), "must have 3 elements, got 1"),
        ("edit_values", _pack("<f4", 1), "must have 0 elements, got 1"),
        ("released_sequence_ids", b"1", "whole elements of 8 bytes, got 1 bytes"),
    ],
)
def test_wrong_lengths_are_refused(field: str, value: bytes, match: str) -> None:
    with pytest.raises(InvalidStepError, match=rf"^\[step\] {field} .*{match}"):
        wire.read_step(_step(**{field: value}))


def test_output_sources_need_their_arrays() -> None:
    sources = bytes([1, 2])
    with pytest.raises(InvalidStepError, match="row_source_steps must have 2 elements, got 0"):
        wire.read_step(_step(row_token_sources=sources, row_source_wanted=_pack("<i4", 0, 1)))
    with pytest.raises(InvalidStepError, match="row_source_wanted must have 2 elements, got 0"):
        wire.read_step(_step(row_token_sources=sources, row_source_steps=_pack("<u8", 0, 4)))
    request = wire.read_step(
        _step(
            row_token_sources=sources,
            row_source_steps=_pack("<u8", 0, 4),
            row_source_wanted=_pack("<i4", 0, 1),
        )
    )
    assert request.source_steps.tolist() == [0, 4]
    assert request.source_wanted.tolist() == [0, 1]


def test_reads_openings_releases_and_indexes() -> None:
    key = pb.SequenceKey(sequence_id=2**64 - 1, generation=7)
    message = pb.OpenSequences(
        sequences=[pb.OpenSequence(key=key, cache_salt="s", token_ids=_pack("<i4", 1, 2))]
    )
    (opening,) = wire.read_openings(message)
    assert (opening.sequence_id, opening.generation, opening.cache_salt) == (2**64 - 1, 7, "s")
    assert opening.token_ids.tolist() == [1, 2]
    assert wire.read_released(pb.ReleaseSequences(sequence_ids=_pack("<u8", 1, 2))) == [1, 2]
    assert wire.read_wanted_indexes(pb.FetchLogits(wanted_indexes=_pack("<i4", 3))).tolist() == [3]
    with pytest.raises(InvalidRequestError, match=r"^\[release\] sequence_ids must be whole"):
        wire.read_released(pb.ReleaseSequences(sequence_ids=b"123"))


COUNTS = KvOccupancy(10, 7, 2, 1)


def test_writes_results() -> None:
    answer = StepAnswer(
        9, Outcome.COMPUTED, COUNTS, queue_ns=1, prepare_ns=2, results=step_results()
    )
    result = wire.step_result(answer, executor_epoch=77, total_ns=30)
    assert (result.step_id, result.executor_epoch) == (9, 77)
    assert result.outcome == pb.STEP_OUTCOME_COMPUTED
    assert list(result.row_outcomes) == [RowOutcome.COMPUTED, RowOutcome.NON_FINITE]
    assert list(result.non_finite_details) == ["layers.3.mlp.down"]
    assert np.frombuffer(result.argmax_ids, "<i4").tolist() == [4, -1]
    assert np.frombuffer(result.quantile_ids, "<i4").tolist() == [-1, 6]
    assert np.frombuffer(result.normalizers, "<f4").tolist() == [0, 3.5]
    assert np.frombuffer(result.top_k_starts, "<i4").tolist() == [0, 1, 1]
    assert np.frombuffer(result.top_k_weights, "<f4").tolist() == [1]
    assert np.frombuffer(result.named_logits, "<f4").tolist() == [0.25]
    assert len(result.digests) == 32
    timings = result.timings
    assert (timings.queue_ns, timings.prepare_ns, timings.forward_ns) == (1, 2, 11)
    assert (timings.statistics_ns, timings.total_ns) == (12, 30)
    (path,) = result.kernel_paths
    assert (path.op, path.path) == (pb.KERNEL_OP_LINEAR, pb.KERNEL_PATH_GEMM)
    assert (path.unit, path.dispatches, path.rows) == (pb.KERNEL_UNIT_VNNI, 3, 40)
    counts = result.kv_occupancy
    assert (counts.total_blocks, counts.free_blocks) == (10, 7)
    assert (counts.evictable_blocks, counts.shared_blocks) == (2, 1)


def test_writes_a_refusal_for_want_of_blocks() -> None:
    result = wire.step_result(StepAnswer(9, Outcome.NO_CAPACITY, COUNTS), 77, 30)
    assert result.outcome == pb.STEP_OUTCOME_NO_CAPACITY
    assert result.row_outcomes == b""


def test_values_are_those_of_the_contract() -> None:
    for stat in Stat:
        assert pb.Statistic.Value(f"STATISTIC_{stat.name}") == stat.value
    for outcome in RowOutcome:
        assert pb.RowOutcome.Value(f"ROW_OUTCOME_{outcome.name}") == outcome.value
    for step_outcome in Outcome:
        assert pb.StepOutcome.Value(f"STEP_OUTCOME_{step_outcome.name}") == step_outcome.value


def test_every_kernel_op_path_and_unit_has_a_name() -> None:
    assert {*wire.KERNEL_OPS.values()} == {*pb.KernelOp.values()} - {0}
    assert {*wire.KERNEL_PATHS.values()} == {*pb.KernelPath.values()} - {0}
    assert {*wire.KERNEL_UNITS.values()} == {*pb.KernelUnit.values()} - {0}
    assert PATHS.keys() == wire.KERNEL_OPS.keys()
    assert {path for paths in PATHS.values() for path in paths} == wire.KERNEL_PATHS.keys()
