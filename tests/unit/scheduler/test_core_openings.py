"""Who is opened before a step, what the answers change, and what pins blocks in vain."""

from __future__ import annotations

from scheduler_service.core import (
    KvCounts,
    RequestAdmitted,
    RequestId,
    RequestStatus,
    SchedulerState,
    SequenceOpened,
    apply,
    cancel,
    capacity_refused,
    executor_restarted,
    opened,
    openings,
    plan,
    record_kv_counts,
    submit,
)
from tests.support.core_scenarios import (
    make_limits,
    make_request,
    must_plan,
    open_waiting,
    run_step,
    shape,
    state_with,
)

A, B = RequestId("a"), RequestId("b")


def _names(state: SchedulerState, now: float = 0.0) -> list[str]:
    return [each.request_id for each in openings(state, now)]


def test_a_row_starts_after_what_is_cached() -> None:
    """The rest of the prompt is one row; the admission says how much was found."""
    state = state_with(make_limits(), make_request("a", 10, 2))
    batch = must_plan(state, cached={"a": 8})
    assert shape(batch) == {"a": (8, 2)}
    assert batch.rows[0].wanted[0].drawn_position == 10
    request = state.requests[A]
    assert (request.num_cached_tokens, request.num_cached_prompt_tokens) == (8, 8)
    (event,) = batch.events
    assert isinstance(event, RequestAdmitted)
    assert event.num_cached_tokens == 8


def test_nobody_runs_unopened() -> None:
    """Planning without the executor's answer would compute what is there, or collide with it."""
    state = state_with(make_limits(), make_request("a"))
    assert plan(state, 0.0) is None
    assert _names(state) == ["a"]
    assert plan(state, 0.0) is None
    assert state.requests[A].status is RequestStatus.WAITING


def test_those_that_would_be_admitted_are_opened() -> None:
    """Not those beyond the tokens of the step, or beyond `max_num_seqs`."""
    requests = [make_request(name, 4) for name in "abcd"]
    assert _names(state_with(make_limits(tokens=9), *requests)) == ["a", "b", "c"]
    requests = [make_request(name, 4) for name in "abcd"]
    assert _names(state_with(make_limits(seqs=2), *requests)) == ["a", "b"]


def test_what_is_cached_makes_room_for_more() -> None:
    """Asked again with the answers, it names those that the saved tokens leave room for."""
    state = state_with(make_limits(tokens=8), *(make_request(name, 8) for name in "abc"))
    assert _names(state) == ["a"]
    assert [e.request_id for e in open_waiting(state, {"a": 4, "b": 7})] == ["a", "b", "c"]
    assert shape(must_plan(state)) == {"a": (4, 4), "b": (7, 1), "c": (0, 3)}


def test_asking_is_repeated_until_it_is_answered() -> None:
    """A session that broke meanwhile is resumed with the same Open."""
    state = state_with(make_limits(), make_request("a"))
    assert openings(state, 0.0) == openings(state, 0.0) != ()
    open_waiting(state)
    assert openings(state, 0.0) == ()


def test_nobody_is_opened_while_a_step_is_in_flight_or_past_the_deadline() -> None:
    """A step in flight is repeated first; a request without time is about to end."""
    state = state_with(make_limits(), make_request("a", deadline=5.0))
    assert _names(state, 5.0) == []
    must_plan(state)
    submit(state, make_request("b"))
    assert _names(state) == []


def test_who_ends_between_opening_and_answer_is_given_back() -> None:
    """The executor may hold the sequence, so it is released; the answer changes nothing."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    found = openings(state, 0.0)
    cancel(state, A)
    opened(state, [SequenceOpened(each.request_id, each.sequence_id, 0, 3) for each in found])
    batch = must_plan(state)
    assert batch.released_sequence_ids == (1,)
    assert shape(batch) == {"b": (3, 1)}


def test_who_ends_before_it_was_announced_is_not_given_back() -> None:
    """The executor never heard of it."""
    state = state_with(make_limits(), make_request("a"))
    cancel(state, A)
    assert state.to_release == []


def test_an_answer_for_another_generation_changes_nothing() -> None:
    """After a restart the same request is opened as a new generation."""
    state = state_with(make_limits(), make_request("a", 8))
    (old,) = openings(state, 0.0)
    executor_restarted(state)
    (new,) = openings(state, 0.0)
    assert (old.generation, new.generation) == (0, 1)
    opened(state, [SequenceOpened(A, old.sequence_id, 0, 4)])
    assert not state.requests[A].is_opened
    opened(state, [SequenceOpened(A, new.sequence_id, 1, 2, 77)])
    assert state.requests[A].num_computed_tokens == 2
    assert state.requests[A].provenance_handle == 77
    opened(state, [SequenceOpened(A, new.sequence_id, 1, 4)])
    assert state.requests[A].num_computed_tokens == 2, "answered once"
    assert state.requests[A].num_preemptions == 0


def test_a_restart_closes_what_was_opened() -> None:
    """Nothing is left to release, and the request starts from what the new process has."""
    state = state_with(make_limits(), make_request("a", 8))
    open_waiting(state, {"a": 4})
    record_kv_counts(state, KvCounts(total=32, free=1, evictable=0, shared=0))
    executor_restarted(state)
    state.check_invariants()
    assert (state.to_release, state.num_blocks_to_release, state.kv_counts) == ([], 0, None)
    assert shape(must_plan(state)) == {"a": (0, 8)}


def test_the_reply_counts_prompt_tokens_found_before_the_first_row() -> None:
    """Not those that a preempted request finds again, which are its own."""
    state = state_with(make_limits(), make_request("a", 8, 9), make_request("b", 8, 9))
    must_plan(state, cached={"b": 4})
    executor_restarted(state)
    must_plan(state, cached={"b": 7})
    assert state.requests[B].num_cached_prompt_tokens == 4
    assert state.requests[B].num_cached_tokens == 7


def test_the_first_in_the_queue_is_opened_before_it_fits() -> None:
    """Its blocks may be cached: then it runs although all of its tokens would not fit."""
    state = state_with(make_limits(blocks=8), make_request("a", 12, 4))
    run_step(state)
    counts = KvCounts(total=8, free=1, evictable=4, shared=0)
    record_kv_counts(state, counts)
    submit(state, make_request("b", 17, 4))
    submit(state, make_request("c", 17, 4))
    assert _names(state) == ["b"]
    record_kv_counts(state, KvCounts(total=8, free=2, evictable=2, shared=2))
    batch = must_plan(state, cached={"b": 16})
    assert shape(batch) == {"a": (12, 1), "b": (16, 1)}


def test_the_executor_s_counts_see_what_is_shared() -> None:
    """By own sums nothing is left; three blocks are free because four are shared."""
    limits = make_limits(blocks=8)
    state = state_with(limits, make_request("a", 15, 4, salt=""))
    run_step(state)
    submit(state, make_request("b", 17, 4, salt=""))
    record_kv_counts(state, KvCounts(total=8, free=2, evictable=0, shared=4))
    assert shape(must_plan(state, cached={"b": 16})) == {"a": (15, 1), "b": (16, 1)}


def _pinned(state: SchedulerState) -> None:
    """Let `a` run and open `b`, which has 8 cached tokens and does not fit."""
    submit(state, make_request("a", 4, 20))
    run_step(state)
    submit(state, make_request("b", 12, 8))
    open_waiting(state, {"b": 8})


def test_a_running_request_takes_back_what_a_waiting_one_pins() -> None:
    """Before anybody is preempted; and it is not opened again until somebody has ended."""
    state = SchedulerState(make_limits(blocks=5))
    _pinned(state)
    assert state.requests[B].num_computed_tokens == 8
    while state.requests[A].num_tokens < 13:
        batch, _ = run_step(state)
        assert (set(shape(batch)), batch.events) == ({"a"}, ())
    batch, _ = run_step(state)
    assert (shape(batch), batch.released_sequence_ids) == ({"a": (12, 1)}, (2,))
    assert batch.events == ()
    assert state.requests[B].generation == 1
    assert _names(state) == []
    cancel(state, A)
    assert shape(must_plan(state)) == {"b": (0, 12)}


def test_a_refused_step_takes_back_what_a_waiting_one_pins() -> None:
    """The request that ran alone is tried again and is not to blame."""
    state = SchedulerState(make_limits(blocks=5))
    _pinned(state)
    assert capacity_refused(state, must_plan(state)) == []
    assert state.num_refusals_alone == 0
    batch = must_plan(state)
    assert (set(shape(batch)), batch.released_sequence_ids) == ({"a"}, (2,))


def test_what_others_pin_does_not_stop_a_queue_without_running_requests() -> None:
    """The first one takes it back and is admitted a step later."""
    state = state_with(make_limits(blocks=5), make_request("a", 12, 8), make_request("b", 13, 7))
    found = openings(state, 0.0)
    assert [each.request_id for each in found] == ["a"]
    opened(state, [SequenceOpened(A, found[0].sequence_id, 0)])
    state.requests[B].is_announced = state.requests[B].is_opened = True
    state.requests[B].num_cached_tokens = state.requests[B].num_computed_tokens = 12
    batch = must_plan(state)
    assert (batch.rows, batch.released_sequence_ids) == ((), (2,))
    apply(state, batch, {})
    assert shape(must_plan(state)) == {"a": (0, 12)}
