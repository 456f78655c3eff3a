"""How requests come in and how they end from outside a step."""

from __future__ import annotations

from scheduler_service.core.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
)
from scheduler_service.core.events import Event
from scheduler_service.core.lifecycle import finish
from scheduler_service.core.request import FinishReason, Request, RequestId, SequenceId
from scheduler_service.core.state import SchedulerState


def submit(state: SchedulerState, request: Request) -> None:
    """Queue a new request, give it its sequence id and clip its `max_tokens`.

    Raises:
        InvalidParameterError: The prompt is empty or `max_tokens` is below 1.
        DuplicateRequestError: A live request has the same id.
        PromptTooLongError: Prompt and one token exceed the context or the whole pool.
        QueueFullError: `max_num_waiting` requests wait already.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    limits = state.limits
    if num_prompt_tokens == 0:
        raise InvalidParameterError("submit", "prompt", "must have at least one token", 0)
    if request.max_tokens < 1:
        raise InvalidParameterError(
            "submit", "max_tokens", "must be at least 1", request.max_tokens
        )
    if request.request_id in state.requests:
        raise DuplicateRequestError(request.request_id)
    num_left = limits.max_sequence_length - num_prompt_tokens
    if num_left < 1:
        raise PromptTooLongError(num_prompt_tokens, limits.context_length, limits.pool_capacity)
    if len(state.waiting) >= limits.max_num_waiting:
        raise QueueFullError(limits.max_num_waiting)
    request.max_tokens = min(request.max_tokens, num_left)
    state.last_sequence_id = SequenceId(state.last_sequence_id + 1)
    request.sequence_id = state.last_sequence_id
    state.requests[request.request_id] = request
    state.waiting.push_back(request)
    state.deadlines.push(request, state.requests)


def cancel(state: SchedulerState, request_id: RequestId) -> list[Event]:
    """End a request with CANCELLED; nothing happens when it is not live."""
    return _end(state, request_id, FinishReason.CANCELLED)


def finish_by_stop_string(state: SchedulerState, request_id: RequestId) -> list[Event]:
    """End a request with STOP because its text holds a stop string; nothing if not live."""
    return _end(state, request_id, FinishReason.STOP)


def fail(state: SchedulerState, request_id: RequestId, detail: str) -> list[Event]:
    """End a request with ERROR and say why; nothing happens when it is not live."""
    return _end(state, request_id, FinishReason.ERROR, detail)


def expire(state: SchedulerState, now: float) -> list[Event]:
    """End all requests whose deadline is `now` (monotonic seconds) or earlier with DEADLINE."""
    expired = state.deadlines.pop_expired(state.requests, now)
    return [finish(state, request, FinishReason.DEADLINE) for request in expired]


def next_deadline(state: SchedulerState) -> float | None:
    """Return the earliest deadline of a live request in monotonic seconds, or None."""
    return state.deadlines.next_deadline(state.requests)


def _end(
    state: SchedulerState, request_id: RequestId, reason: FinishReason, detail: str = ""
) -> list[Event]:
    request = state.requests.get(request_id)
    if request is None:
        return []
    return [finish(state, request, reason, detail=detail)]
