"""Planning a step while the one before it is computed: when, what, and what becomes of it."""

from __future__ import annotations

from scheduler_service.core import (
    FinishReason,
    KvCounts,
    RequestFinished,
    RequestId,
    SampledRow,
    SchedulerState,
    SequenceId,
    TokenEmitted,
    TokenRowBatch,
    TokenSource,
    TokenSourceKind,
    apply,
    cancel,
    capacity_refused,
    executor_restarted,
    may_plan_ahead,
    pause,
    plan,
    plan_ahead,
    record_kv_counts,
    source_refused,
    submit,
)
from tests.support.core_scenarios import make_limits, make_request, must_plan


def _ahead(state: SchedulerState, *, is_chosen: bool = True) -> TokenRowBatch | None:
    batch = plan_ahead(state, lambda _: is_chosen)
    state.check_invariants()
    return batch


def _running(*names: str, prompt: int = 4, max_tokens: int = 9, **limits: int) -> SchedulerState:
    """A state with these requests in the step in flight, which reads their prompts."""
    state = SchedulerState(make_limits(**limits))
    for name in names:
        submit(state, make_request(name, prompt, max_tokens))
    must_plan(state)
    return state


def _answer(state: SchedulerState, *tokens: int) -> list[object]:
    """Fold the answer to the first step in flight back: a token for each row."""
    batch = state.in_flight
    assert batch is not None
    sampled = {row.request_id: SampledRow(t) for row, t in zip(batch.rows, tokens, strict=True)}
    events = apply(state, batch, sampled)
    state.check_invariants()
    return list(events)


def test_rows_ahead_name_the_tokens_of_the_step_in_flight() -> None:
    state = _running("a", "b")
    before = state.in_flight
    ahead = _ahead(state)
    assert ahead is not None
    assert before is not None
    assert ahead.step_id == before.step_id + 1
    for index, row in enumerate(ahead.rows):
        assert row.request_id == before.rows[index].request_id
        assert (row.token_ids, row.start_position) == ((0,), 4)
        assert row.source == TokenSource(TokenSourceKind.STEP_OUTPUT, before.step_id, index)
        assert row.wanted[0].drawn_position == 5
    _answer(state, 7, 8)
    assert (state.in_flight, state.ahead) == (ahead, None)
    # And so on: the next one's rows come behind those.
    following = _ahead(state)
    assert following is not None
    assert [row.start_position for row in following.rows] == [5, 5]
    _answer(state, 9, 10)
    assert [list(each.output_token_ids) for each in state.requests.values()] == [[7, 9], [8, 10]]


def test_nothing_is_planned_ahead_of_a_token_that_the_executor_does_not_choose() -> None:
    state = _running("a")
    assert _ahead(state, is_chosen=False) is None
    assert _ahead(state) is not None


def test_nothing_is_planned_ahead_while_somebody_waits() -> None:
    state = _running("a", "b", seqs=1)
    assert len(state.waiting) == 1
    assert _ahead(state) is None
    pause(state, RequestId("b"))
    assert _ahead(state) is not None


def test_it_is_told_beforehand_whether_steps_may_be_planned_ahead() -> None:
    state = _running("a", "b", seqs=2)
    assert may_plan_ahead(state, lambda _: True)
    assert not may_plan_ahead(state, lambda _: False)
    submit(state, make_request("c", 4, 9))
    assert not may_plan_ahead(state, lambda _: True)
    pause(state, RequestId("c"))
    assert may_plan_ahead(state, lambda _: True)
    for name in ("a", "b"):
        pause(state, RequestId(name))
    assert may_plan_ahead(state, lambda _: False)


def test_nothing_is_planned_ahead_of_a_part_of_a_prompt() -> None:
    state = _running("a", "b", chunk=3)
    assert _ahead(state) is None
    # Nor where a request that runs has no row.
    state = _running("a", "b", tokens=4)
    assert _ahead(state) is None


def test_a_request_that_ends_by_its_length_gets_no_row() -> None:
    state = _running("a", max_tokens=1)
    assert _ahead(state) is None
    state = _running("a", max_tokens=2)
    assert _ahead(state) is not None
    _answer(state, 7)
    assert _ahead(state) is None
    (_, end) = _answer(state, 8)
    assert isinstance(end, RequestFinished)
    assert end.reason is FinishReason.LENGTH
    assert state.num_vain_rows == 0


def test_a_row_of_a_request_that_has_stopped_is_ignored_and_counted() -> None:
    """Its cached state is given back with the step after the one that computes it."""
    state = SchedulerState(make_limits())
    submit(state, make_request("a", 4, 9, stop=frozenset({7})))
    submit(state, make_request("b", 4, 9))
    must_plan(state)
    ahead = _ahead(state)
    assert ahead is not None
    events = _answer(state, 7, 8)
    assert [type(event) for event in events] == [TokenEmitted, RequestFinished, TokenEmitted]
    following = _ahead(state)
    assert following is not None
    assert [row.request_id for row in following.rows] == ["b"]
    assert following.rows[0].source.wanted_index == 1
    assert following.released_sequence_ids == (SequenceId(1),)
    assert not ahead.released_sequence_ids
    assert _answer(state, 1, 2) == [TokenEmitted(request_id=RequestId("b"), token_id=2, index=1)]
    assert state.num_vain_rows == 1


def test_a_paused_request_gets_no_row_and_stops_nobody() -> None:
    state = _running("a", "b")
    pause(state, RequestId("a"))
    ahead = _ahead(state)
    assert ahead is not None
    assert [row.request_id for row in ahead.rows] == ["b"]


def test_blocks_of_both_steps_must_be_there() -> None:
    """Whoever comes first takes none that a later row of the step in flight needs."""
    state = _running("a", "b", blocks=4)
    # Each holds one block of four with the step in flight, and needs another for the next.
    assert _ahead(state) is not None
    state = _running("a", "b", blocks=3)
    assert _ahead(state) is None
    # The executor's own counts may know of more that is free.
    state = _running("a", "b", blocks=3)
    record_kv_counts(state, KvCounts(total=9, free=4, evictable=0, shared=0))
    assert _ahead(state) is not None


def test_after_a_refused_step_the_one_ahead_does_not_run_and_has_none_behind_it() -> None:
    state = _running("a", "b")
    before, ahead = state.in_flight, _ahead(state)
    assert before is not None
    assert ahead is not None
    capacity_refused(state, before)
    state.check_invariants()
    assert state.in_flight is ahead
    assert _ahead(state) is None
    source_refused(state, ahead)
    state.check_invariants()
    again = plan(state, 1.0)
    assert again is not None
    assert again.step_id == ahead.step_id + 1
    assert [(row.request_id, row.token_ids) for row in again.rows] == [("a", (0, 1, 2, 3))]


def test_a_cancelled_request_frees_its_blocks_after_the_steps_in_flight() -> None:
    state = _running("a", "b")
    ahead = _ahead(state)
    assert ahead is not None
    cancel(state, RequestId("a"))
    _answer(state, 7, 8)
    following = _ahead(state)
    assert following is not None
    assert following.released_sequence_ids == (SequenceId(1),)
    _answer(state, 7, 9)
    assert state.num_vain_rows == 2


def test_a_restart_forgets_both_steps() -> None:
    state = _running("a")
    before, ahead = state.in_flight, _ahead(state)
    assert before is not None
    assert ahead is not None
    executor_restarted(state)
    state.check_invariants()
    assert (state.in_flight, state.ahead, state.step_id) == (None, None, 0)
    for batch in (before, ahead):
        assert apply(state, batch, {RequestId("a"): SampledRow(7)}) == []
    assert state.num_vain_rows == 0
