"""Submitting, and ending from outside a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler_service.core import (
    DuplicateRequestError,
    FinishReason,
    InvalidParameterError,
    Limits,
    PromptTooLongError,
    QueueFullError,
    RequestFinished,
    RequestId,
    RequestStatus,
    cancel,
    expire,
    fail,
    finish_by_stop_string,
    next_deadline,
    submit,
)
from tests.support.core_scenarios import make_limits, make_request, run_step, state_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core import Event, SchedulerState


def test_submit_queues_and_numbers_requests_in_order() -> None:
    """Sequence ids rise with arrival and start at 1."""
    a, b = make_request("a"), make_request("b")
    state = state_with(make_limits(), a, b)
    assert (a.sequence_id, b.sequence_id) == (1, 2)
    assert list(state.waiting) == [a, b]
    assert state.has_work
    state.check_invariants()


def test_sequence_ids_are_never_reused() -> None:
    """A request that ended leaves its number behind."""
    state = state_with(make_limits(), make_request("a"))
    cancel(state, RequestId("a"))
    again = make_request("a")
    submit(state, again)
    assert again.sequence_id == 2


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(0, 4, "prompt"), (4, 0, "max_tokens"), (4, -1, "max_tokens")],
)
def test_empty_prompts_and_lengths_are_refused(prompt: int, max_tokens: int, field: str) -> None:
    """The error names field, rule and value."""
    state = state_with(make_limits())
    with pytest.raises(
        InvalidParameterError, match=rf"^\[submit\] {field} must .*, got "
    ) as caught:
        submit(state, make_request("a", prompt, max_tokens))
    assert caught.value.field == field
    assert not state.requests


def test_a_live_id_is_refused_and_a_past_one_is_not() -> None:
    """Ids are unique among live requests only."""
    state = state_with(make_limits(), make_request("a"))
    with pytest.raises(DuplicateRequestError, match="got 'a'"):
        submit(state, make_request("a"))
    cancel(state, RequestId("a"))
    submit(state, make_request("a"))
    assert len(state.waiting) == 1


@pytest.mark.parametrize(
    ("limits", "most", "words"),
    [
        (make_limits(context=20), 19, "at most 19 tokens .* in the context of 20, got 20$"),
        (
            make_limits(blocks=3, block_size=4),
            11,
            "cache must hold the 12 tokens of the prompt and one more, 13 in all, got room for 12: "
            "its kv_memory_mb is too small$",
        ),
    ],
)
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(
    limits: Limits, most: int, words: str
) -> None:
    """The longest prompt is one below the smaller of context and pool."""
    state = state_with(limits, make_request("fits", most))
    with pytest.raises(PromptTooLongError, match=words) as e:
        submit(state, make_request("long", most + 1))
    assert e.value.num_prompt_tokens == most + 1
    assert e.value.context_length == limits.context_length
    assert e.value.pool_capacity == limits.pool_capacity


def test_max_tokens_is_clipped_to_what_the_context_leaves() -> None:
    """Prompt and output together never exceed context or pool."""
    request = make_request("a", 15, 100)
    state_with(make_limits(context=20), request)
    assert request.max_tokens == 5
    request = make_request("a", 7, 100)
    state_with(make_limits(blocks=3, block_size=4), request)
    assert request.max_tokens == 5


def test_a_full_queue_refuses() -> None:
    """The bound is on waiting requests; running ones do not count."""
    state = state_with(make_limits(waiting=2), make_request("a"), make_request("b"))
    with pytest.raises(QueueFullError, match="at most 2 requests may wait"):
        submit(state, make_request("c"))
    run_step(state)
    submit(state, make_request("c"))
    state.check_invariants()


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        (cancel, FinishReason.CANCELLED, ""),
        (finish_by_stop_string, FinishReason.STOP, ""),
        (lambda state, name: fail(state, name, "broken"), FinishReason.ERROR, "broken"),
    ],
)
@pytest.mark.parametrize("is_running", [False, True])
def test_ending_a_request_from_outside(
    end: Callable[[SchedulerState, RequestId], list[Event]],
    reason: FinishReason,
    detail: str,
    is_running: bool,
) -> None:
    """One event, the sequence is given back if it was running, and a second call does nothing."""
    request = make_request("a")
    state = state_with(make_limits(), request)
    if is_running:
        run_step(state)
    expected = RequestFinished(request_id=request.request_id, reason=reason, detail=detail)
    assert end(state, request.request_id) == [expected]
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason is reason
    assert state.to_release == ([request.sequence_id] if is_running else [])
    assert not state.requests
    assert end(state, request.request_id) == []
    state.check_invariants()


def test_expiry_ends_waiting_and_running_requests_in_order_of_deadline() -> None:
    """Both kinds end with DEADLINE; those with time left stay."""
    running = make_request("running", deadline=2.0)
    state = state_with(make_limits(seqs=1), running)
    run_step(state)
    for name, deadline in (("soon", 1.0), ("late", 9.0), ("never", None)):
        submit(state, make_request(name, deadline=deadline))
    assert next_deadline(state) == 1.0
    assert expire(state, 0.5) == []
    ended = expire(state, 2.0)
    assert [(e.request_id, e.reason) for e in ended if isinstance(e, RequestFinished)] == [
        ("soon", FinishReason.DEADLINE),
        ("running", FinishReason.DEADLINE),
    ]
    assert state.to_release == [running.sequence_id]
    assert next_deadline(state) == 9.0
    state.check_invariants()
