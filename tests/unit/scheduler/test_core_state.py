"""Limits are checked, and `check_invariants` sees a broken state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from scheduler_service.core import (
    InvalidParameterError,
    Limits,
    RequestId,
    RequestStatus,
    SequenceId,
)
from tests.support.core_scenarios import make_limits, make_request, run_step, state_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core import SchedulerState

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


COUNTS = [n for n in Limits.__slots__ if n not in ("max_step_seconds", "cost_curve")]


@pytest.mark.parametrize("name", COUNTS)
def test_a_limit_below_one_is_refused(name: str) -> None:
    """Each bound by its name."""
    values: dict[str, Any] = dict.fromkeys(COUNTS, 4)
    values[name] = 0
    with pytest.raises(InvalidParameterError, match=rf"\[limits\] {name} must be .* 1, got 0"):
        Limits(**values)


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_a_bound_on_time_is_finite(seconds: float) -> None:
    """0 derives it from the curve."""
    values: dict[str, Any] = dict.fromkeys(COUNTS, 4)
    with pytest.raises(InvalidParameterError, match="max_step_seconds must be finite"):
        Limits(**values, max_step_seconds=seconds)


def test_the_longest_sequence_is_bounded_by_context_and_pool() -> None:
    """Whichever is smaller."""
    assert make_limits(blocks=3, block_size=4, context=100).max_sequence_length == 12
    assert make_limits(blocks=3, block_size=4, context=10).max_sequence_length == 10


def _wrong_count(state: SchedulerState) -> None:
    state.waiting.num_tokens += 1


def _not_opened(state: SchedulerState) -> None:
    state.requests[A].is_opened = False


def _released_early(state: SchedulerState) -> None:
    state.to_release.append(state.requests[A].sequence_id)


def _opened_unasked(state: SchedulerState) -> None:
    state.requests[C].is_opened = True


def _lost(state: SchedulerState) -> None:
    del state.running[A]


def _wrong_status(state: SchedulerState) -> None:
    state.requests[A].status = RequestStatus.PREEMPTED


def _no_work(state: SchedulerState) -> None:
    state.requests[A].num_computed_tokens += 1


def _waiting_holds(state: SchedulerState) -> None:
    state.requests[C].num_computed_tokens = 1


def _waiting_runs(state: SchedulerState) -> None:
    state.requests[C].status = RequestStatus.RUNNING


def _pool_exceeded(state: SchedulerState) -> None:
    state.limits = make_limits(blocks=1, context=128)


def _too_many(state: SchedulerState) -> None:
    state.limits = make_limits(seqs=1)


def _released_twice(state: SchedulerState) -> None:
    state.to_release = [SequenceId(9), SequenceId(9)]


def _bad_ceiling(state: SchedulerState) -> None:
    state.block_ceiling = 0


def _too_long(state: SchedulerState) -> None:
    state.requests[C].max_tokens = 1000


def _past_max_tokens(state: SchedulerState) -> None:
    state.requests[A].max_tokens = 1


@pytest.mark.parametrize(
    "damage",
    [
        _wrong_count,
        _not_opened,
        _released_early,
        _opened_unasked,
        _lost,
        _wrong_status,
        _no_work,
        _waiting_holds,
        _waiting_runs,
        _pool_exceeded,
        _too_many,
        _released_twice,
        _bad_ceiling,
        _too_long,
        _past_max_tokens,
    ],
)
def test_damage_is_seen(damage: Callable[[SchedulerState], None]) -> None:
    """A sound state passes; each kind of damage raises."""
    state = state_with(make_limits(seqs=2), *(make_request(n) for n in "abc"))
    run_step(state)
    state.check_invariants()
    damage(state)
    with pytest.raises(AssertionError, match="scheduler_state"):
        state.check_invariants()
