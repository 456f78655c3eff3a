"""A client that reads slowly pauses its own request and nobody else's."""

import math
from functools import partial

import pytest

from scheduler_service.core import Request, RequestId, SchedulerState
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.streams import TokenStream
from scheduler_service.text.detokenizer import Detokenizer
from tests.support.core_scenarios import make_limits, make_request, state_with

A, B = RequestId("a"), RequestId("b")


def _state() -> SchedulerState:
    return state_with(make_limits(), make_request("a"), make_request("b"))


def test_a_request_is_paused_beyond_the_bound_and_goes_on_when_all_is_taken() -> None:
    state, readers = _state(), SlowReaders(3, 10.0)
    readers.check(state, A, 3, 1.0)
    assert not state.requests[A].is_paused
    readers.check(state, A, 4, 2.0)
    assert state.requests[A].is_paused
    assert not state.requests[B].is_paused
    assert len(readers) == 1
    assert readers.drained(state, A)
    assert not state.requests[A].is_paused
    assert not readers.drained(state, A)
    assert len(readers) == 0


def test_the_time_counts_from_the_first_pause() -> None:
    state, readers = _state(), SlowReaders(3, 10.0)
    assert readers.next_time() is None
    readers.check(state, A, 4, 2.0)
    readers.check(state, B, 4, 3.0)
    readers.check(state, A, 5, 9.0)
    assert readers.next_time() == 12.0
    assert readers.overdue(11.9) == []
    assert readers.overdue(12.0) == [A]
    assert readers.overdue(13.0) == [A, B]
    readers.forget(A)
    assert readers.next_time() == 13.0


@pytest.mark.parametrize("readers", [SlowReaders(3, math.inf)])
def test_without_a_limit_nobody_is_given_up(readers: SlowReaders) -> None:
    readers.check(_state(), A, 4, 2.0)
    assert readers.overdue(1e9) == []


def test_taking_what_is_pending_is_told() -> None:
    request: Request = make_request("a")
    stream = TokenStream(request, Detokenizer([b"x"], frozenset()))
    told: list[int] = []
    stream.on_drained = partial(told.append, 1)
    assert stream.take() is None
    for _ in range(3):
        stream.push_token(0, 1.0)
    assert (stream.num_pending, told) == (3, [])
    stream.take()
    assert (stream.num_pending, told) == (0, [1])
