"""Folding answers back: tokens, ends, and answers that come too late or not at all."""

from __future__ import annotations

import pytest

from scheduler_service.core import (
    FinishReason,
    KvCounts,
    PreemptionReason,
    RequestFinished,
    RequestId,
    RequestPreempted,
    RequestStatus,
    SampledRow,
    TokenEmitted,
    apply,
    cancel,
    capacity_refused,
    executor_restarted,
    plan,
    record_kv_counts,
    submit,
)
from scheduler_service.core.apply import MAX_REFUSALS_ALONE
from tests.support.core_scenarios import (
    answer,
    finished,
    make_limits,
    make_request,
    must_plan,
    run_step,
    shape,
    state_with,
)

A, B = RequestId("a"), RequestId("b")
RESTART = PreemptionReason.EXECUTOR_RESTART


def test_tokens_are_emitted_in_row_order_with_their_index() -> None:
    """One event for each wanted row, counted from 0 in each request."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    run_step(state, token_id=7)
    _, events = run_step(state, token_id=8)
    assert events == [
        TokenEmitted(request_id=A, token_id=8, index=1),
        TokenEmitted(request_id=B, token_id=8, index=1),
    ]
    assert state.requests[A].output_token_ids == [7, 8]


def test_a_chunk_without_wanted_position_emits_nothing() -> None:
    """Only the computed count moves."""
    state = state_with(make_limits(chunk=3), make_request("a", 5))
    _, events = run_step(state)
    assert events == []
    assert state.requests[A].num_computed_tokens == 3


def test_max_tokens_ends_with_length() -> None:
    """The last token is emitted, then the end."""
    state = state_with(make_limits(), make_request("a", max_tokens=1))
    _, events = run_step(state, token_id=7)
    assert events == [
        TokenEmitted(request_id=A, token_id=7, index=0),
        RequestFinished(request_id=A, reason=FinishReason.LENGTH),
    ]
    assert state.to_release == [1]


def test_a_stop_token_is_emitted_and_named_and_wins_over_length() -> None:
    """Stop tokens count as generated; with both, the reason is STOP."""
    state = state_with(make_limits(), make_request("a", max_tokens=1, stop=frozenset({7})))
    _, events = run_step(state, token_id=7)
    assert events == [
        TokenEmitted(request_id=A, token_id=7, index=0),
        RequestFinished(request_id=A, reason=FinishReason.STOP, stop_token_id=7),
    ]


def test_an_error_ends_its_own_request_only() -> None:
    """The detail reaches the event; the neighbour gets its token."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    batch = must_plan(state)
    sampled = {A: SampledRow(error="layer 3, attention"), B: SampledRow(5)}
    events = apply(state, batch, sampled)
    assert events == [
        RequestFinished(request_id=A, reason=FinishReason.ERROR, detail="layer 3, attention"),
        TokenEmitted(request_id=B, token_id=5, index=0),
    ]
    state.check_invariants()


def test_an_error_may_come_from_a_row_that_wanted_nothing() -> None:
    """A prefill chunk can turn out not finite."""
    state = state_with(make_limits(chunk=3), make_request("a", 5))
    events = apply(state, must_plan(state), {A: SampledRow(error="layer 0")})
    assert finished(events)["a"].reason is FinishReason.ERROR


def test_a_wanted_row_without_token_is_our_bug() -> None:
    """Nothing is guessed."""
    state = state_with(make_limits(), make_request("a"))
    with pytest.raises(AssertionError, match="must have a token"):
        apply(state, must_plan(state), {})


def test_a_row_cancelled_in_flight_is_ignored_and_released_next() -> None:
    """Its token is dropped, its blocks are given back before the next rows."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    batch = must_plan(state)
    cancel(state, A)
    assert apply(state, batch, answer(batch, 5)) == [
        TokenEmitted(request_id=B, token_id=5, index=0)
    ]
    assert must_plan(state).released_sequence_ids == (1,)


def test_a_new_request_of_the_same_id_is_not_mistaken_for_the_old_one() -> None:
    """The sequence id tells them apart."""
    state = state_with(make_limits(), make_request("a"))
    batch = must_plan(state)
    cancel(state, A)
    submit(state, make_request("a"))
    assert apply(state, batch, answer(batch)) == []
    batch = must_plan(state)
    assert (batch.rows[0].sequence_id, batch.released_sequence_ids) == (2, (1,))


def test_an_old_answer_is_not_mistaken_for_one_to_a_new_request_of_the_same_id() -> None:
    """Same id and same generation: the sequence id alone tells them apart."""
    state = state_with(make_limits(), make_request("a"))
    old = must_plan(state)
    cancel(state, A)
    submit(state, make_request("a"))
    executor_restarted(state)
    new = must_plan(state)
    assert (old.rows[0].generation, new.rows[0].generation) == (0, 0)
    assert apply(state, old, answer(old)) == []
    assert state.requests[A].output_token_ids == []


def test_a_restart_makes_running_requests_wait_in_order_and_keeps_their_tokens() -> None:
    """Computed counts are gone, generations rise, nothing is released, step ids start again."""
    state = state_with(make_limits(seqs=2), *(make_request(n) for n in "abc"))
    run_step(state, token_id=7)
    events = executor_restarted(state)
    assert events == [
        RequestPreempted(request_id=name, num_lost_tokens=4, reason=RESTART) for name in (A, B)
    ]
    assert [request.request_id for request in state.waiting.ordered(0.0)] == ["a", "b", "c"]
    assert state.to_release == []
    state.check_invariants()
    batch = must_plan(state)
    assert batch.step_id == 1
    assert [(r.request_id, r.generation, r.token_ids) for r in batch.rows] == [
        ("a", 1, (0, 1, 2, 3, 7)),
        ("b", 1, (0, 1, 2, 3, 7)),
    ]


def test_an_answer_from_before_a_restart_is_ignored() -> None:
    """It neither advances a request nor ends the flight of the new batch."""
    state = state_with(make_limits(), make_request("a"))
    old = must_plan(state)
    executor_restarted(state)
    new = must_plan(state)
    assert apply(state, old, answer(old)) == []
    assert capacity_refused(state, old) == []
    assert state.in_flight is new
    assert len(apply(state, new, answer(new))) == 1


def test_a_release_planned_before_a_restart_is_forgotten() -> None:
    """The new process never knew the sequence."""
    state = state_with(make_limits(), make_request("a"))
    run_step(state)
    cancel(state, A)
    executor_restarted(state)
    assert plan(state, 0.0) is None


def test_a_restart_with_a_smaller_pool_ends_what_no_longer_fits() -> None:
    """Too long ends with ERROR; the other is clipped and goes on."""
    state = state_with(make_limits(), make_request("a", 20, 50), make_request("b", 4, 50))
    run_step(state)
    events = executor_restarted(state, make_limits(blocks=5, block_size=4))
    assert finished(events)["a"].reason is FinishReason.ERROR
    assert state.requests[B].max_tokens == 16
    assert state.to_release == []
    state.check_invariants()


def test_a_restart_whose_context_is_used_up_ends_the_request() -> None:
    """With exactly the known tokens allowed, not one more could be generated."""
    state = state_with(make_limits(), make_request("a", 6, 50))
    run_step(state)
    run_step(state)
    events = executor_restarted(state, make_limits(context=8))
    assert finished(events)["a"].reason is FinishReason.ERROR


def test_a_refusal_lowers_the_ceiling_until_a_running_request_ends() -> None:
    """Each refusal by at least one block below what was asked; an end lifts it again."""
    state = state_with(make_limits(), *(make_request(n, 8, 9) for n in "abc"))
    capacity_refused(state, must_plan(state))
    assert state.block_ceiling == 5
    capacity_refused(state, must_plan(state))
    assert state.block_ceiling == 3
    cancel(state, A)
    assert state.block_ceiling == state.limits.num_blocks


def test_a_refusal_never_raises_the_ceiling() -> None:
    """A later step may have asked for less than an earlier one, or for more."""
    state = state_with(make_limits(), make_request("a", 4, 9), make_request("b", 4, 9))
    run_step(state)
    state.block_ceiling = 3
    batch = must_plan(state)
    capacity_refused(state, batch)
    assert state.block_ceiling == 2


def test_a_refused_step_preempts_the_last_running_request() -> None:
    """Nothing was computed; the rest is planned again and the victim waits for blocks."""
    state = state_with(make_limits(), make_request("a", 8), make_request("b", 8))
    batch = must_plan(state)
    assert capacity_refused(state, batch) == [
        RequestPreempted(request_id=B, num_lost_tokens=0, reason=PreemptionReason.CAPACITY)
    ]
    state.check_invariants()
    again = must_plan(state)
    assert again.step_id == 2
    assert shape(again) == {"a": (0, 8)}
    assert again.released_sequence_ids == (2,)
    apply(state, again, answer(again))
    while A in state.requests:
        batch, _ = run_step(state)
        assert set(shape(batch)) == {"a"}, "counting on what was refused would be refused again"
    assert set(shape(must_plan(state))) == {"b"}


def test_a_request_that_runs_alone_is_tried_again_and_then_ends() -> None:
    """It keeps its cached state while it is tried; then there is nothing left to free."""
    state = state_with(make_limits(), make_request("a"))
    run_step(state)
    for _ in range(MAX_REFUSALS_ALONE):
        assert capacity_refused(state, must_plan(state)) == []
        assert state.requests[A].status is RequestStatus.RUNNING
    events = capacity_refused(state, must_plan(state))
    assert finished(events)["a"].reason is FinishReason.ERROR
    assert "block pool" in finished(events)["a"].detail
    assert state.to_release == [1]


def test_a_computed_step_forgives_earlier_refusals() -> None:
    """Only refusals in a row count."""
    state = state_with(make_limits(), make_request("a", 4, 20))
    for _ in range(3 * MAX_REFUSALS_ALONE):
        assert capacity_refused(state, must_plan(state)) == []
        run_step(state)
    assert A in state.requests


def test_a_refusal_after_every_request_was_cancelled_changes_nothing() -> None:
    """There is nobody to preempt."""
    state = state_with(make_limits(), make_request("a"))
    batch = must_plan(state)
    cancel(state, A)
    assert capacity_refused(state, batch) == []
    assert state.in_flight is None


def test_kv_counts_are_kept_for_reports() -> None:
    """The last ones recorded."""
    state = state_with(make_limits())
    counts = KvCounts(total=8, free=5, evictable=2, shared=1)
    record_kv_counts(state, counts)
    assert state.kv_counts == counts
