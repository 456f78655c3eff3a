"""Who is preempted for whom, and in which order the running requests are served and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core import (
    PreemptionReason,
    Priority,
    RequestId,
    RequestPreempted,
    SchedulerState,
    pause,
    plan,
    resume,
    submit,
)
from scheduler_service.core.precedence import keep_order, leader, service_order
from tests.support.core_scenarios import (
    make_limits,
    make_request,
    must_plan,
    run_step,
    shape,
    state_with,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core import Request, TokenRowBatch

INTERACTIVE, NORMAL, BATCH = Priority
A, B = RequestId("a"), RequestId("b")


def _names(requests: Iterable[Request]) -> str:
    return "".join(request.request_id for request in requests)


def _preempted(batch: TokenRowBatch) -> dict[str, PreemptionReason]:
    events = [event for event in batch.events if isinstance(event, RequestPreempted)]
    return {event.request_id: event.reason for event in events}


def _running(*requests: Request, blocks: int = 32, seqs: int = 8) -> SchedulerState:
    """Return a state in which these run, with their prompts computed and one token."""
    state = state_with(make_limits(blocks=blocks, seqs=seqs), *requests)
    run_step(state)
    assert len(state.running) == len(requests)
    return state


def test_the_leader_is_kept_first_then_the_class_then_what_would_be_lost() -> None:
    """Of the younger ones the lowest class goes first, and in a class the least work."""
    state = _running(
        make_request("b", 3, priority=BATCH),
        make_request("n", 3),
        make_request("m", 9),
        make_request("l", 9, priority=BATCH),
        make_request("i", 2, priority=INTERACTIVE),
    )
    assert leader(state) is state.requests[RequestId("b")]
    assert _names(keep_order(state)) == "bimnl"
    assert _names(service_order(state)) == "inmbl"
    state.requests[RequestId("m")].num_cached_tokens = 8
    assert _names(keep_order(state)) == "binml", "what is cached is not lost"


def test_a_paused_request_is_kept_last_and_served_not_at_all() -> None:
    """It is no leader either, however old."""
    state = _running(
        make_request("a", priority=INTERACTIVE),
        make_request("b", priority=BATCH),
        make_request("c", priority=BATCH),
    )
    pause(state, A)
    assert leader(state) is state.requests[B]
    assert _names(keep_order(state)) == "bca"
    assert set(shape(run_step(state)[0])) == {"b", "c"}
    resume(state, A)
    assert set(shape(run_step(state)[0])) == {"a", "b", "c"}


def test_a_higher_class_takes_the_place_of_a_lower_one_when_the_pool_is_full() -> None:
    """At once: the blocks that are given back with a step are there for its rows."""
    state = _running(make_request("b", 12, 9, priority=BATCH), make_request("n", 12, 9), blocks=8)
    submit(state, make_request("i", 12, priority=INTERACTIVE))
    batch = must_plan(state)
    assert _preempted(batch) == {"b": PreemptionReason.PRIORITY}
    assert shape(batch) == {"n": (12, 1), "i": (0, 12)}
    assert batch.released_sequence_ids == (1,)


def test_a_higher_class_takes_a_slot() -> None:
    """The number of sequences is a limit like that of blocks."""
    state = _running(make_request("b", priority=BATCH), seqs=1)
    submit(state, make_request("n"))
    assert _preempted(run_step(state)[0]) == {"b": PreemptionReason.PRIORITY}
    assert set(shape(must_plan(state))) == {"n"}


def test_nobody_is_preempted_without_need() -> None:
    """There is room, or the class is the same, or it would not be enough."""
    small = make_request("b", 4, priority=BATCH)
    state = _running(small, make_request("n", 12))
    submit(state, make_request("i", 4, priority=INTERACTIVE))
    assert _preempted(must_plan(state)) == {}

    state = _running(make_request("m", 12), make_request("n", 12), blocks=8)
    submit(state, make_request("o", 12))
    assert _preempted(must_plan(state)) == {}

    state = _running(make_request("n", 12), make_request("b", 4, priority=BATCH), blocks=6)
    submit(state, make_request("m", 12))
    assert _preempted(must_plan(state)) == {}


def test_only_as_many_as_it_takes_are_preempted() -> None:
    """One large one that is enough alone spares the small ones looked at before it."""
    state = _running(
        make_request("l", 4, priority=INTERACTIVE),
        *(make_request(name, 4, priority=BATCH) for name in "bc"),
        make_request("d", 20, priority=BATCH),
        blocks=13,
    )
    submit(state, make_request("n", 16))
    assert set(_preempted(must_plan(state))) == {"d"}


def test_a_paused_request_gives_way_to_any_class() -> None:
    """It comes back by itself when it is resumed and there is room."""
    state = _running(make_request("a", priority=INTERACTIVE), seqs=1)
    pause(state, A)
    assert not state.has_work
    assert plan(state, 0.0) is None
    submit(state, make_request("b", 4, 2, priority=BATCH))
    batch, _ = run_step(state)
    assert _preempted(batch) == {"a": PreemptionReason.PAUSED}
    assert set(shape(run_step(state)[0])) == {"b"}
    run_step(state)
    assert run_step(state)[0].rows == (), "only a release"
    assert plan(state, 0.0) is None
    resume(state, A)
    assert set(shape(run_step(state)[0])) == {"a"}


def test_an_aged_request_is_next_but_takes_no_place() -> None:
    """Ageing changes the order of the queue, not the right to preempt."""
    state = _running(make_request("n", 4, 100), seqs=1)
    submit(state, make_request("b", priority=BATCH))
    batch = must_plan(state, now=1000.0)
    assert set(shape(batch)) == {"n"}


def test_a_request_that_was_admitted_by_its_age_is_not_sent_back() -> None:
    """It keeps the rank at which it was admitted."""
    state = state_with(make_limits(seqs=1), make_request("b", priority=BATCH))
    must_plan(state, now=1000.0)
    state.in_flight = None
    submit(state, make_request("i", priority=INTERACTIVE, arrival=1000.0))
    assert _preempted(must_plan(state, now=1000.0)) == {}


def test_a_request_gives_way_at_most_twice() -> None:
    """Each time it comes back one class higher, so it loses a bounded amount of work."""
    state = _running(make_request("b", 4, 90, priority=BATCH), seqs=1)
    for number in range(9):
        submit(state, make_request(f"i{number}", 4, 1, priority=INTERACTIVE))
        for _ in range(6):
            run_step(state)
    assert state.requests[B].num_yields == 2
    assert state.requests[B].num_preemptions == 2
