"""Which tokens a step computes: one test for each rule of the policy."""

from __future__ import annotations

import pytest

from scheduler_service.core import (
    PreemptionReason,
    RequestAdmitted,
    RequestId,
    RequestPreempted,
    RequestStatus,
    apply,
    cancel,
    capacity_refused,
    plan,
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


def test_nothing_to_do_is_no_batch() -> None:
    """An idle scheduler plans nothing and uses no step id."""
    state = state_with(make_limits())
    assert not state.has_work
    assert plan(state, 0.0) is None
    assert state.step_id == 0


def test_a_new_request_is_opened_and_its_last_token_wanted() -> None:
    """The first row starts at 0; logits are wanted at its last token only."""
    request = make_request("a", [5, 6, 7], arrival=1.0)
    state = state_with(make_limits(), request)
    (opening,) = open_waiting(state)
    batch = must_plan(state, now=3.5)
    (row,) = batch.rows
    assert batch.step_id == 1
    assert (row.request_id, row.sequence_id, row.generation) == ("a", 1, 0)
    assert (row.token_ids, row.start_position) == ((5, 6, 7), 0)
    (wanted,) = row.wanted
    assert (wanted.offset, wanted.drawn_position) == (2, 3)
    assert wanted.params is request.params
    assert (opening.request_id, opening.sequence_id, opening.generation) == ("a", 1, 0)
    assert opening.token_ids == (5, 6, 7)
    assert batch.events == (
        RequestAdmitted(request_id=RequestId("a"), queue_seconds=2.5, is_readmission=False),
    )


def test_one_batch_is_in_flight_at_a_time() -> None:
    """Planning twice would compute the same tokens twice."""
    state = state_with(make_limits(), make_request("a"))
    must_plan(state)
    with pytest.raises(AssertionError, match="no step may be in flight, got 1"):
        plan(state, 0.0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 10, 64])
def test_a_prompt_is_cut_into_chunks(chunk: int) -> None:
    """Chunks are contiguous and at most `max_prefill_chunk`; the last one alone wants logits."""
    state = state_with(make_limits(chunk=chunk), make_request("a", 10, 2))
    spans = []
    while True:
        batch, _ = run_step(state)
        (row,) = batch.rows
        spans.append((row.start_position, len(row.token_ids)))
        if row.wanted:
            break
    starts = list(range(0, 10, chunk))
    assert spans == [(start, min(chunk, 10 - start)) for start in starts]


def test_decode_and_prefill_share_a_step() -> None:
    """Single-token rows are served first, the rest of the step goes to the prompt."""
    state = state_with(make_limits(tokens=8), make_request("a", 2), make_request("b", 2))
    run_step(state)
    submit(state, make_request("c", 20))
    batch, _ = run_step(state)
    assert shape(batch) == {"a": (2, 1), "b": (2, 1), "c": (0, 6)}
    batch, _ = run_step(state)
    assert shape(batch) == {"a": (3, 1), "b": (3, 1), "c": (6, 6)}


def test_long_prompts_never_hold_single_tokens_back() -> None:
    """A younger single-token row comes before an older long one, but for one token."""
    state = state_with(make_limits(tokens=4, chunk=4), make_request("old", 3, 9))
    run_step(state)
    submit(state, make_request("young", 1, 9))
    run_step(state)
    old = state.requests[RequestId("old")]
    old.num_computed_tokens = 0  # as after a recomputation
    old.output_token_ids.extend([1] * 10)
    old.max_tokens = 30
    batch = must_plan(state)
    assert shape(batch) == {"old": (0, 3), "young": (1, 1)}


def test_the_oldest_request_always_advances() -> None:
    """With a budget of one token the oldest long row gets it, not a younger single-token row."""
    state = state_with(make_limits(), make_request("old", 1, 9), make_request("young", 1))
    run_step(state)
    state.requests[RequestId("old")].num_computed_tokens = 0
    state.limits = make_limits(tokens=1)
    assert shape(must_plan(state)) == {"old": (0, 1)}


def test_max_num_seqs_bounds_the_running_set() -> None:
    """The third request waits until one of two ends."""
    state = state_with(make_limits(seqs=2), *(make_request(n, 2, 2) for n in "abc"))
    assert shape(run_step(state)[0]) == {"a": (0, 2), "b": (0, 2)}
    assert shape(run_step(state)[0]) == {"a": (2, 1), "b": (2, 1)}
    assert shape(run_step(state)[0]) == {"c": (0, 2)}


def test_the_step_budget_bounds_tokens_and_admissions() -> None:
    """What is left of the budget cuts the next prompt; with nothing left nobody is admitted."""
    state = state_with(make_limits(tokens=6), *(make_request(n, 4) for n in "abc"))
    batch = must_plan(state)
    assert shape(batch) == {"a": (0, 4), "b": (0, 2)}
    assert batch.num_tokens == 6
    assert state.requests[RequestId("c")].status is RequestStatus.WAITING


def test_admission_waits_until_the_whole_known_length_fits() -> None:
    """It counts the known tokens of running requests too, not only the computed ones."""
    limits = make_limits(chunk=4, blocks=6, block_size=4)
    state = state_with(limits, make_request("a", 16, 1), make_request("b", 8, 1))
    for start in (0, 4, 8, 12):
        assert shape(run_step(state)[0]) == {"a": (start, 4)}
    assert shape(run_step(state)[0]) == {"b": (0, 4)}


def test_admission_leaves_a_block_for_each_running_request_to_grow_into() -> None:
    """Exactly full is not admitted; with one block to spare it is."""
    for blocks, admitted in ((4, {"a"}), (5, {"a", "b"})):
        limits = make_limits(blocks=blocks, block_size=4)
        state = state_with(limits, make_request("a", 8, 9), make_request("b", 8, 1))
        assert set(shape(must_plan(state))) == admitted


def test_a_waiting_head_that_does_not_fit_holds_those_behind_it() -> None:
    """First come, first served: a small request does not overtake."""
    limits = make_limits(blocks=6, block_size=4)
    state = state_with(limits, *(make_request(n, p, 4) for n, p in (("a", 8), ("b", 16), ("c", 1))))
    assert set(shape(must_plan(state))) == {"a"}


def test_the_running_request_least_worth_keeping_is_the_victim() -> None:
    """A row that needs a block takes it from the other request, which keeps its tokens."""
    limits = make_limits(blocks=5, block_size=4)
    state = state_with(limits, make_request("a", 7, 9), make_request("b", 7, 9))
    for _ in range(2):
        run_step(state)  # both have 8 computed tokens and two blocks each
    run_step(state)  # a takes the fifth block, b waits with nothing to grow into
    b = state.requests[RequestId("b")]
    assert (b.status, len(b.output_token_ids)) == (RequestStatus.RUNNING, 2)
    for _ in range(3):
        run_step(state)
    batch = must_plan(state)
    assert shape(batch) == {"a": (12, 1)}
    assert batch.events == (
        RequestPreempted(
            request_id=RequestId("b"), num_lost_tokens=8, reason=PreemptionReason.CAPACITY
        ),
    )
    assert batch.released_sequence_ids == (b.sequence_id,)
    assert (b.status, b.generation, b.num_preemptions) == (RequestStatus.PREEMPTED, 1, 1)
    assert len(b.output_token_ids) == 2


def test_a_preempted_request_recomputes_prompt_and_output() -> None:
    """It comes back with a new generation, from position 0, and draws at the next position."""
    limits = make_limits(blocks=5, block_size=4)
    state = state_with(limits, make_request("a", 7, 7), make_request("b", 7, 9))
    while state.requests.get(RequestId("a")):
        run_step(state, token_id=50)
    (opening,) = open_waiting(state)
    assert (opening.generation, opening.token_ids) == (1, (0, 1, 2, 3, 4, 5, 6, 50, 50))
    batch = must_plan(state)
    (row,) = batch.rows
    assert (row.request_id, row.generation, row.start_position) == ("b", 1, 0)
    assert row.token_ids == (0, 1, 2, 3, 4, 5, 6, 50, 50)
    assert row.wanted[0].drawn_position == 9
    assert [e.is_readmission for e in batch.events if isinstance(e, RequestAdmitted)] == [True]


def test_a_row_is_cut_to_the_blocks_that_are_left() -> None:
    """A long row takes what fits before anybody is preempted."""
    limits = make_limits(blocks=5, block_size=4)
    state = state_with(limits, make_request("a", 4, 9), make_request("b", 4, 9))
    run_step(state)
    a = state.requests[RequestId("a")]
    a.output_token_ids.extend([1] * 13)
    a.max_tokens = 16
    batch = must_plan(state)
    assert shape(batch) == {"a": (4, 12)}
    assert batch.events == ()


def test_a_sequence_does_not_come_back_in_the_batch_that_gives_it_back() -> None:
    """A release names no generation, so it could hit the new one: it goes out on its own."""
    state = state_with(make_limits(), make_request("a"), make_request("b"))
    capacity_refused(state, must_plan(state))  # preempts b
    cancel(state, RequestId("a"))
    batch = must_plan(state)
    assert batch.rows == ()
    assert batch.released_sequence_ids == (2, 1)
    apply(state, batch, {})
    batch = must_plan(state)
    assert [(row.request_id, row.generation) for row in batch.rows] == [("b", 1)]


def test_a_release_is_sent_once_even_without_rows() -> None:
    """The last request's blocks come free although nothing is left to compute."""
    state = state_with(make_limits(), make_request("a"))
    run_step(state)
    cancel(state, RequestId("a"))
    batch, _ = run_step(state)
    assert (batch.rows, batch.released_sequence_ids) == ((), (1,))
    assert plan(state, 0.0) is None
