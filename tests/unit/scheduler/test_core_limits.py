"""What is refused at once: too many, too long, too late; and samples that come together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core import (
    DeadlineUnreachableError,
    DuplicateRequestError,
    InvalidParameterError,
    Priority,
    QueueFullError,
    RequestId,
    SchedulerState,
    pause,
    submit,
)
from scheduler_service.core.cost_curve import CostCurve, CostPoint
from tests.support.core_scenarios import make_limits, make_request, run_step, state_with


def _measured(seconds_per_token: float = 0.01) -> SchedulerState:
    """Return a state whose prompts were computed at this speed."""
    state = SchedulerState(make_limits(seqs=1))
    state.service_rate.record_step(100, 100, 100 * seconds_per_token)
    return state


def test_waiting_tokens_are_bounded() -> None:
    """The bound is on all known tokens of waiting requests; running ones do not count."""
    state = state_with(make_limits(waiting_tokens=20), make_request("a", 12))
    with pytest.raises(QueueFullError, match="at most 20 tokens may wait, got 21") as refused:
        submit(state, make_request("b", 9))
    assert (refused.value.unit, refused.value.bound) == ("tokens", 20)
    submit(state, make_request("b", 8))
    run_step(state)
    submit(state, make_request("c", 9))
    state.check_invariants()


def test_one_request_may_be_longer_than_the_bound_of_tokens() -> None:
    """Else what the model can do could never be asked for."""
    state = state_with(make_limits(waiting_tokens=20), make_request("a", 50))
    with pytest.raises(QueueFullError):
        submit(state, make_request("b", 1))


def test_more_samples_than_may_ever_wait_are_invalid() -> None:
    """Trying again would never help, so it is no full queue."""
    state = SchedulerState(make_limits(waiting=2))
    rule = "num_samples must be at most max_num_waiting, 2, got 3"
    with pytest.raises(InvalidParameterError, match=rule):
        submit(state, *(make_request(name) for name in "abc"))
    assert not state.requests
    submit(state, make_request("a"), make_request("b"))
    with pytest.raises(QueueFullError):
        submit(state, make_request("c"), make_request("d"))


def test_samples_come_together_or_not_at_all() -> None:
    """They count as so many requests; a refused group leaves nothing behind."""
    state = state_with(make_limits(waiting=4), make_request("a"), make_request("b"))
    with pytest.raises(QueueFullError, match="at most 4 requests may wait, got 5"):
        submit(state, *(make_request(name) for name in "cde"))
    with pytest.raises(DuplicateRequestError, match="got 'c'"):
        submit(state, make_request("c"), make_request("c"))
    with pytest.raises(DuplicateRequestError, match="got 'a'"):
        submit(state, make_request("c"), make_request("a"))
    assert set(state.requests) == {"a", "b"}
    submit(state, make_request("c"), make_request("d"))
    assert [state.requests[RequestId(name)].sequence_id for name in "abcd"] == [1, 2, 3, 4]
    state.check_invariants()


def test_a_deadline_is_not_judged_before_anything_was_measured() -> None:
    """Nobody knows how fast this server is."""
    submit(SchedulerState(make_limits()), make_request("a", 50, deadline=1e-9))


def test_a_deadline_that_the_prompt_alone_misses_is_refused_without_a_retry_hint() -> None:
    """Waiting does not help."""
    state = _measured()
    submit(state, make_request("a", 50, deadline=0.5))
    state = _measured()
    with pytest.raises(DeadlineUnreachableError, match="its prompt takes") as refused:
        submit(state, make_request("a", 50, deadline=0.49))
    assert refused.value.needed_seconds == pytest.approx(0.5)
    assert refused.value.left_seconds == pytest.approx(0.49)
    assert refused.value.retry_seconds is None
    assert not state.requests
    assert not len(state.waiting)
    state.check_invariants()


def test_a_deadline_that_the_queue_makes_miss_is_refused_with_a_retry_hint() -> None:
    """The hint is how much too long the queue is."""
    state = _measured()
    submit(state, make_request("a", 50))
    with pytest.raises(DeadlineUnreachableError, match="the queue and its prompt") as refused:
        submit(state, make_request("b", 10, deadline=0.4))
    assert refused.value.needed_seconds == pytest.approx(0.6)
    assert refused.value.retry_seconds == pytest.approx(0.2)
    submit(state, make_request("b", 10, deadline=0.6))


def test_a_cost_curve_judges_before_anything_was_seen_and_the_faster_speed_counts() -> None:
    """A guess must not refuse what was seen to be possible; what is cached is not computed."""
    curve = CostCurve([CostPoint(1, n, 0, 0.01 * n) for n in (1, 8, 16, 32)])
    for seen, cached, deadline in ((None, 0, 0.5), (0.001, 0, 0.05), (1.0, 0, 0.5), (1.0, 40, 0.1)):
        state = SchedulerState(replace(make_limits(seqs=1), cost_curve=curve))
        if seen is not None:
            state.service_rate.record_step(100, 100, 100 * seen)
        state.service_rate.record_admission(0.0, 0.0, 50, cached)
        with pytest.raises(DeadlineUnreachableError):
            submit(state, make_request("a", 50, deadline=0.99 * deadline))
        submit(state, make_request("a", 50, deadline=1.01 * deadline))


def test_only_those_before_it_count() -> None:
    """A lower class, another client's flood and paused requests do not make a deadline late."""
    state = _measured()
    submit(state, make_request("b", 50, priority=Priority.BATCH))
    submit(state, make_request("n", 10, deadline=0.15, arrival=0.0))
    with pytest.raises(DeadlineUnreachableError):
        submit(state, make_request("m", 10, deadline=0.15))
    state = _measured()
    submit(state, *(make_request(f"f{number}", 20, client="flood") for number in range(9)))
    submit(state, make_request("s", 10, client="single", deadline=0.35))
    state = _measured()
    submit(state, make_request("p", 50, 1))
    pause(state, RequestId("p"))
    submit(state, make_request("q", 10, deadline=0.15))


def test_what_running_requests_have_to_compute_counts() -> None:
    """A prompt of which some is computed counts with the rest."""
    state = SchedulerState(make_limits(chunk=10))
    submit(state, make_request("a", 50))
    run_step(state)
    state.service_rate.record_step(100, 100, 1.0)
    with pytest.raises(DeadlineUnreachableError) as refused:
        submit(state, make_request("b", 10, deadline=0.15))
    assert refused.value.needed_seconds == pytest.approx(0.5)


def test_the_retry_hint_of_a_full_queue_follows_the_rate_of_service() -> None:
    """One place is free when the next request is admitted."""
    state = state_with(make_limits(waiting=1), make_request("a"))
    for number in range(40):
        state.service_rate.record_admission(0.0, 3.0 * number, 10, 0)
    with pytest.raises(QueueFullError, match="try again in 3 s") as refused:
        submit(state, make_request("b"))
    assert refused.value.retry_seconds == pytest.approx(3.0, rel=0.05)
