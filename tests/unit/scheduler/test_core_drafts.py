"""Rows with drafted tokens: what an answer to them does to a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core import (
    CostCurve,
    CostPoint,
    Event,
    FinishReason,
    RequestFinished,
    RequestId,
    RequestPreempted,
    RequestStatus,
    SampledRow,
    SchedulerState,
    TokenEmitted,
    TokenRowBatch,
    apply,
    cancel,
    plan,
    submit,
)
from tests.support.core_scenarios import (
    finished,
    make_limits,
    make_request,
    must_plan,
    open_waiting,
    run_step,
    state_with,
)

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def drafted(state: SchedulerState, drafts: tuple[int, ...], name: RequestId = A) -> TokenRowBatch:
    """Plan a step with these drafted tokens for a request."""
    batch = plan(state, 0.0, {name: drafts})
    assert batch is not None
    state.check_invariants()
    return batch


def must(state: SchedulerState) -> TokenRowBatch:
    """Return the step that is in flight."""
    assert state.in_flight is not None
    return state.in_flight


def emitted(events: list[Event]) -> list[tuple[int, int]]:
    """Return (index, token) of each token."""
    return [(each.index, each.token_id) for each in events if isinstance(each, TokenEmitted)]


@pytest.mark.parametrize("num_accepted", range(4))
def test_accepted_tokens_and_the_first_other_are_emitted(num_accepted: int) -> None:
    """What is computed ends before the last emitted token, as it does without drafts."""
    state = state_with(make_limits(), make_request("a", 4, max_tokens=9))
    run_step(state, token_id=50)
    batch = drafted(state, (51, 52, 53))
    accepted = (51, 52, 53)[:num_accepted]
    events = apply(state, batch, {A: SampledRow(60, None, accepted)})
    state.check_invariants()
    assert emitted(events) == list(enumerate((*accepted, 60), start=1))
    request = state.requests[A]
    assert request.output_token_ids == [50, *accepted, 60]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert request.num_draft_tokens == 3
    assert request.num_accepted_draft_tokens == num_accepted
    row = must_plan(state).rows[0]
    assert row.token_ids == (60,)
    assert row.start_position == 4 + 1 + num_accepted


def test_a_stop_token_among_accepted_ones_is_the_last() -> None:
    state = state_with(make_limits(), make_request("a", max_tokens=9, stop=frozenset({52})))
    run_step(state, token_id=50)
    events = apply(state, drafted(state, (51, 52, 53)), {A: SampledRow(54, None, (51, 52, 53))})
    assert emitted(events) == [(1, 51), (2, 52)]
    end = RequestFinished(request_id=A, reason=FinishReason.STOP, stop_token_id=52)
    assert events[-1] == end
    state.check_invariants()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7, 8])
def test_b32_a_run_of_drafts_ends_with_max_tokens(max_tokens: int) -> None:
    """However long an accepted run could be, exactly as many tokens come as were asked for."""
    request = make_request("a", max_tokens=max_tokens)
    state = state_with(make_limits(), request)
    run_step(state, token_id=50)
    events: list[Event] = []
    while state.requests:
        batch = drafted(state, (51, 52, 53, 54, 55))
        row = batch.rows[0]
        assert row.start_position + len(row.token_ids) < 4 + max_tokens
        events += apply(state, batch, {A: SampledRow(56, None, row.draft_token_ids)})
        state.check_invariants()
    assert len(request.output_token_ids) == max_tokens
    assert request.finish_reason is FinishReason.LENGTH


def test_a_row_that_is_not_finite_with_drafts_is_computed_again_without() -> None:
    """The fault may be a drafted token's own."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    run_step(state, token_id=50)
    events = apply(state, drafted(state, (51,)), {A: SampledRow(error="layer 3"), B: SampledRow(7)})
    state.check_invariants()
    assert [each.request_id for each in events if isinstance(each, RequestPreempted)] == [A]
    request = state.requests[A]
    assert request.status is RequestStatus.PREEMPTED
    assert not request.takes_drafts
    assert request.output_token_ids == [50]
    assert state.requests[B].output_token_ids == [50, 7]
    assert state.requests[B].takes_drafts


def test_a_row_that_is_not_finite_without_drafts_ends_its_request() -> None:
    state = state_with(make_limits(), make_request("a"))
    run_step(state, token_id=50)
    events = apply(state, must_plan(state), {A: SampledRow(error="layer 3")})
    assert finished(events)[A].reason is FinishReason.ERROR


def test_drafts_get_what_is_left_of_the_step() -> None:
    """Prompts come first, and rows of prompts take none."""
    state = state_with(
        make_limits(tokens=16, chunk=12), make_request("a", 4, 9), make_request("b", 9, 9)
    )
    run_step(state, token_id=50)
    submit(state, make_request("c", 9))
    open_waiting(state)
    batch = plan(state, 0.0, {A: (1, 2, 3, 4), B: (5, 6, 7, 8), C: (9,)})
    assert batch is not None
    assert [row.draft_token_ids for row in batch.rows] == [(1, 2, 3, 4), (5,), ()]
    assert batch.num_tokens == 16
    assert [each.offset for each in batch.rows[0].wanted] == [0, 1, 2, 3, 4]
    assert [each.drawn_position for each in batch.rows[0].wanted] == [5, 6, 7, 8, 9]


def test_drafts_leave_a_spare_block_for_each_running_request() -> None:
    """Two requests of one block each; of six blocks two are spare, so two are for drafts."""
    state = state_with(make_limits(blocks=6), make_request("a", 3, 20), make_request("b", 3, 20))
    run_step(state, token_id=50)
    batch = plan(state, 0.0, {A: (1,) * 12, B: (2,) * 12})
    assert batch is not None
    assert [row.num_draft_tokens for row in batch.rows] == [8, 0]


def test_blocks_of_refused_drafts_are_still_held() -> None:
    """The executor never takes blocks back from a running sequence: they are counted, once."""
    state = state_with(make_limits(blocks=8), make_request("a", 3, 20))
    run_step(state, token_id=50)
    assert state.num_blocks_held() == 1
    for _ in range(3):
        batch = drafted(state, (1,) * 9)
        assert batch.rows[0].num_draft_tokens == 9
        apply(state, batch, {A: SampledRow(50)})
        state.check_invariants()
    assert state.num_blocks_held() == 4
    assert state.requests[A].num_computed_tokens == 6
    for _ in range(10):
        run_step(state, token_id=50)
    assert state.num_blocks_held() == 4
    run_step(state, token_id=50)
    assert state.num_blocks_held() == 5


def test_a_request_that_fills_the_pool_goes_on_in_blocks_that_drafts_took() -> None:
    state = state_with(make_limits(blocks=3, block_size=4), make_request("a", 3, 9))
    run_step(state, token_id=50)
    apply(state, drafted(state, (1, 2, 3)), {A: SampledRow(50)})
    while state.requests:
        run_step(state, token_id=50)
    assert state.num_blocks_held() == 0


def test_nobody_is_admitted_to_blocks_that_refused_drafts_hold() -> None:
    """Six of eight are held although four tokens are known: three more do not fit."""
    state = state_with(make_limits(blocks=8, block_size=1), make_request("a", 2, 5))
    run_step(state, token_id=50)
    apply(state, drafted(state, (1, 2, 3)), {A: SampledRow(50)})
    assert state.num_blocks_held() == 6
    submit(state, make_request("b", 3, 1))
    assert {row.request_id for row in must_plan(state).rows} == {"a"}


def test_beside_a_prompt_drafts_keep_the_bound_of_the_step() -> None:
    """A second for the weights and one for each token, eight in all."""
    curve = CostCurve(CostPoint(n, n, 0, 1.0 + n) for n in (1, 2, 16))
    limits = replace(make_limits(), cost_curve=curve, max_step_seconds=9.0)
    state = state_with(limits, make_request("a", 1, 40))
    run_step(state, token_id=50)
    assert drafted(state, (1,) * 9).rows[0].num_draft_tokens == 9
    apply(state, must(state), {A: SampledRow(50)})
    for length, expected in ((40, 0), (5, 2)):
        submit(state, make_request(f"p{length}", length, 1))
        open_waiting(state)
        batch = drafted(state, (1,) * 9)
        assert batch.rows[0].num_draft_tokens == expected
        assert batch.predicted_seconds <= 9.0
        apply(state, batch, {row.request_id: SampledRow(50) for row in batch.rows if row.wanted})
        cancel(state, RequestId(f"p{length}"))
        run_step(state, token_id=50)
