"""Every rule of a step names its field and what it got."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from executor_service.engine.step_check import StepChecker, check_step
from executor_service.engine.step_input import build_step_input
from executor_service.engine.step_request import StepRequest
from executor_service.errors import InvalidStepError
from isobatch_kernels.step import Stat
from tests.support.steps import LIMITS, Row, Want, step_request

TOP = Want(Stat.TOP_K | Stat.NAMED, top_k=4, named=(1, 2), edits=((3, 0.5),))
GOOD = step_request(
    1, [Row(1, (5, 6, 7), 4, want=TOP), Row(2, (0,), 1, output_of=(9, 0)), Row(3, (8,))]
)


def _int32(*values: int) -> Any:
    return np.array(values, np.int32)


def test_good_steps_pass() -> None:
    check_step(GOOD, LIMITS)
    check_step(step_request(1, []), LIMITS)
    check_step(step_request(1, [Row(1, (5,), 19, want=None)]), LIMITS)


@pytest.mark.parametrize(
    ("changes", "field", "got"),
    [
        ({"step_id": 0}, "step_id", "0"),
        ({"token_ids": _int32(5, 6, 50, 0, 8)}, "token_ids", "50"),
        ({"token_ids": _int32(5, 6, -1, 0, 8)}, "token_ids", "-1"),
        ({"token_ids": _int32(5, 6, 7, 3, 8)}, "token_ids", "another id"),
        ({"num_tokens": _int32(3, 1, 0)}, "row_num_tokens", "0"),
        ({"num_tokens": _int32(3, 1, 2)}, "row_num_tokens", "6"),
        ({"num_tokens": _int32(1, 3, 1)}, "row_num_tokens", "3"),
        ({"start_positions": _int32(4, -1, 0)}, "row_start_positions", "-1"),
        ({"start_positions": _int32(18, 1, 0)}, "row_start_positions", "21"),
        ({"start_positions": _int32(2**31 - 1, 1, 0)}, "row_start_positions", "2147483650"),
        ({"sequence_ids": np.array([1, 2, 1], np.uint64)}, "row_sequence_ids", "one twice"),
        ({"released": np.array([9, 2], np.uint64)}, "row_sequence_ids", "a released one"),
        ({"sources": np.array([1, 2, 0], np.uint8)}, "row_token_sources", "0"),
        ({"sources": np.array([1, 2, 3], np.uint8)}, "row_token_sources", "3"),
        ({"wanted": _int32(2, 3, 5)}, "wanted_token_indexes", r"2\.\.5"),
        ({"wanted": _int32(-1, 3, 4)}, "wanted_token_indexes", r"-1\.\.4"),
        ({"wanted": _int32(2, 2, 4)}, "wanted_token_indexes", r"\[2, 2, 4\]"),
        ({"wanted": _int32(3, 2, 4)}, "wanted_token_indexes", r"\[3, 2, 4\]"),
        ({"wanted": _int32(0, 2**31 - 1, 4)}, "wanted_token_indexes", r"\[0, 2147483647, 4\]"),
        ({"edit_starts": _int32(0, 2**31 - 1, -2, 1)}, "edit_starts", r"\[0, 2147483647, -2, 1\]"),
        ({"statistics": np.array([128 | 20, 1, 1], np.uint32)}, "wanted_statistics", "128"),
        ({"top_k": _int32(5, 0, 0)}, "wanted_top_k", r"\[5\]"),
        ({"top_k": _int32(0, 0, 0)}, "wanted_top_k", r"\[0\]"),
        ({"top_k": _int32(4, 1, 0)}, "wanted_top_k", "4"),
        ({"inverse_temperatures": np.array([1, 0, 1], np.float32)},
         "wanted_inverse_temperatures", "0.0"),
        ({"inverse_temperatures": np.array([1, np.nan, 1], np.float32)},
         "wanted_inverse_temperatures", "nan"),
        ({"inverse_temperatures": np.array([1, np.inf, 1], np.float32)},
         "wanted_inverse_temperatures", "inf"),
        ({"quantiles": np.array([0, 1, 0], np.float32)}, "wanted_quantiles", "1.0"),
        ({"quantiles": np.array([0, np.nan, 0], np.float32)}, "wanted_quantiles", "nan"),
        ({"named_ids": _int32(1, 50)}, "named_ids", "50"),
        ({"named_starts": _int32(0, 1, 1, 1)}, "named_starts", r"\[0, 1, 1, 1\]"),
        ({"named_starts": _int32(0, 1, 2, 2)}, "named_ids", "ids without it"),
        ({"edit_starts": _int32(0, 1, 0, 1)}, "edit_starts", r"\[0, 1, 0, 1\]"),
        ({"edit_ids": _int32(-1)}, "edit_ids", "-1"),
        ({"edit_values": np.array([np.inf], np.float32)}, "edit_values", "inf"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], field: str, got: str) -> None:
    with pytest.raises(InvalidStepError, match=rf"^\[step\] {field} .*, got .*{got}") as raised:
        check_step(replace(GOOD, **changes), LIMITS)
    assert raised.value.field == field


def test_limits() -> None:
    rows = [Row(index, (1,)) for index in range(4)]
    with pytest.raises(InvalidStepError, match="rows must be at most 3, got 4"):
        check_step(step_request(1, rows), LIMITS)
    with pytest.raises(InvalidStepError, match="tokens must be at most 8, got 9"):
        check_step(step_request(1, [Row(1, (1,) * 9)]), LIMITS)


def test_the_input_places_every_token() -> None:
    tables = np.array([[3, 1], [2, -1], [0, -1]], np.int32)
    tokens = GOOD.token_ids.copy()
    step = build_step_input(GOOD, tokens, tables)
    assert step.query_start_loc.tolist() == [0, 3, 4, 5]
    assert step.positions.tolist() == [4, 5, 6, 1, 0]
    assert step.positions.dtype == step.query_start_loc.dtype == np.int32
    assert step.token_ids is tokens
    assert step.block_tables is tables


def test_good_is_what_the_cases_change() -> None:
    """The cases above each break one rule of a step that keeps all of them."""
    assert isinstance(GOOD, StepRequest)
    assert (GOOD.num_tokens.tolist(), GOOD.wanted.tolist()) == ([3, 1, 1], [2, 3, 4])


def _frozen() -> StepRequest:
    """A decode step as it comes from the wire: arrays that cannot change."""
    request = step_request(1, [Row(1, (5,), 4), Row(2, (6,), 5)])
    for array in (getattr(request, field.name) for field in fields(request)):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return request


@pytest.mark.parametrize(
    "changes",
    [
        {"step_id": 0},
        {"token_ids": _int32(5, 50)},
        {"token_ids": _int32(-1, 5)},
        {"token_ids": _int32(5, 6, 7)},
        {"start_positions": _int32(4, -1)},
        {"start_positions": _int32(20, 5)},
        {"quantiles": np.array([0, 1], np.float32)},
        {"quantiles": np.array([np.nan, 0], np.float32)},
        {"released": np.array([2], np.uint64)},
        {"sequence_ids": np.array([1, 1], np.uint64)},
        {"num_tokens": _int32(2, 1)},
        {"sources": np.array([1, 3], np.uint8)},
        {"statistics": np.array([128, 1], np.uint32)},
        {"top_k": _int32(1, 0)},
        {"inverse_temperatures": np.array([0, 1], np.float32)},
        {"wanted": _int32(1, 0)},
        {"named_ids": _int32(3)},
        {"edit_ids": _int32(3), "edit_values": np.zeros(1, np.float32)},
    ],
    ids=str,
)
def test_a_step_like_the_last_is_refused_as_if_it_were_the_first(changes: dict[str, Any]) -> None:
    checker = StepChecker(LIMITS)
    good = _frozen()
    checker.check(good)
    checker.check(replace(good, step_id=2, token_ids=_int32(7, 8), start_positions=_int32(5, 19)))
    bad = replace(good, **changes)
    with pytest.raises(InvalidStepError) as expected:
        check_step(bad, LIMITS)
    with pytest.raises(InvalidStepError) as found:
        checker.check(bad)
    assert str(found.value) == str(expected.value)
    checker.check(good)


def test_arrays_that_can_change_are_checked_every_time() -> None:
    checker = StepChecker(LIMITS)
    step = step_request(1, [Row(1, (5,), 4)])
    checker.check(step)
    step.statistics[0] = 128
    with pytest.raises(InvalidStepError, match="wanted_statistics"):
        checker.check(step)
