"""How requests come in and how they end from outside a step."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.core.errors import (
    DeadlineUnreachableError,
    DuplicateRequestError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
)
from scheduler_service.core.events import Event
from scheduler_service.core.lifecycle import finish
from scheduler_service.core.request import FinishReason, Request, RequestId, SequenceId
from scheduler_service.core.service_rate import clamp_retry
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import EFFICIENT_SHARE


def submit(state: SchedulerState, *requests: Request) -> None:
    """Queue the new requests of one call, all or none; give them sequence ids in order.

    Clips their `max_tokens`. Samples of one prompt are several requests with the same tokens.

    Raises:
        InvalidParameterError: A prompt is empty, a `max_tokens` is below 1, or they are more than
            may ever wait.
        DuplicateRequestError: A live request or another one of these has the same id, or a live
            one belongs to a call of the same id.
        PromptTooLongError: Prompt and one token exceed the context or the whole pool.
        QueueFullError: With them more than `max_num_waiting` requests or `max_waiting_tokens`
            tokens would wait; a first request waits whatever its length.
        DeadlineUnreachableError: By the speed of late, a deadline passes before the first token.
    """
    names: set[RequestId] = set()
    for request in requests:
        _check(state, request)
        if request.request_id in names:
            raise DuplicateRequestError(request.public_id)
        names.add(request.request_id)
    _check_call(state, requests)
    _check_queue(state, requests)
    for request in requests:
        _enter(state, request)
    try:
        # Samples share their prompt, so the time to its first token is that of the first one.
        _check_deadline(state, requests[0])
    except DeadlineUnreachableError:
        for request in requests:
            state.waiting.remove(request.request_id)
            del state.requests[request.request_id]
        raise


def _check(state: SchedulerState, request: Request) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    limits = state.limits
    if num_prompt_tokens == 0:
        raise InvalidParameterError("submit", "prompt", "must have at least one token", 0)
    if request.max_tokens < 1:
        raise InvalidParameterError(
            "submit", "max_tokens", "must be at least 1", request.max_tokens
        )
    if request.request_id in state.requests:
        raise DuplicateRequestError(request.public_id)
    if num_prompt_tokens >= limits.max_sequence_length:
        raise PromptTooLongError(num_prompt_tokens, limits.context_length, limits.pool_capacity)


def _check_call(state: SchedulerState, requests: Sequence[Request]) -> None:
    """A call lives until its last sample has ended, whichever that is."""
    calls = {request.group_id for request in requests if request.group_id}
    for live in state.requests.values() if calls else ():
        if live.group_id in calls:
            raise DuplicateRequestError(live.group_id)


def _check_queue(state: SchedulerState, requests: Sequence[Request]) -> None:
    limits, waiting, rate = state.limits, state.waiting, state.service_rate
    if len(requests) > limits.max_num_waiting:
        # However empty the queue gets.
        rule = f"must be at most max_num_waiting, {limits.max_num_waiting}"
        raise InvalidParameterError("submit", "num_samples", rule, len(requests))
    num_waiting = len(waiting) + len(requests)
    excess = num_waiting - limits.max_num_waiting
    if excess > 0:
        retry_seconds = rate.retry_seconds(num_requests=excess)
        raise QueueFullError("requests", limits.max_num_waiting, num_waiting, retry_seconds)
    num_tokens = waiting.num_tokens + sum(request.num_tokens for request in requests)
    excess = num_tokens - limits.max_waiting_tokens
    if excess > 0 and len(waiting):
        retry_seconds = rate.retry_seconds(num_tokens=excess)
        raise QueueFullError("tokens", limits.max_waiting_tokens, num_tokens, retry_seconds)


def _enter(state: SchedulerState, request: Request) -> None:
    request.max_tokens = min(
        request.max_tokens, state.limits.max_sequence_length - len(request.prompt_token_ids)
    )
    request.waiting_since = request.arrival
    state.now = max(state.now, request.arrival)
    state.last_sequence_id = SequenceId(state.last_sequence_id + 1)
    request.sequence_id = state.last_sequence_id
    state.requests[request.request_id] = request
    state.waiting.push(request)
    state.deadlines.push(request, state.requests)


def _check_deadline(state: SchedulerState, request: Request) -> None:
    """Refuse a request that has just entered the queue where its deadline cannot be met.

    The estimate is simple: the tokens that running requests and those before it in the queue
    have to compute and its own, less the share that was found in the prefix cache of late, at the
    speed of prompts by the cost curve or as it was seen of late, whichever is higher. It leaves
    out all tokens that are yet to be generated and whoever comes before it later.
    """
    token_seconds = _token_seconds(state)
    if request.deadline is None or token_seconds is None:
        return
    num_tokens = sum(
        each.num_uncomputed_tokens for each in state.running.values() if not each.is_paused
    )
    left_seconds = max(0.0, request.deadline - request.arrival)
    if (num_tokens + state.waiting.num_tokens) * token_seconds <= left_seconds:
        # Whoever is before it, so a long queue need not be gone through.
        return
    for each in state.waiting.ordered(state.now):
        num_tokens += each.num_tokens
        if each is request:
            break
    needed_seconds = num_tokens * token_seconds
    if needed_seconds > left_seconds:
        fits_alone = request.num_tokens * token_seconds <= left_seconds
        retry_seconds = clamp_retry(needed_seconds - left_seconds) if fits_alone else None
        raise DeadlineUnreachableError(needed_seconds, left_seconds, retry_seconds)


def _token_seconds(state: SchedulerState) -> float | None:
    """Return what a token of a prompt costs in seconds, or None while nobody knows."""
    curve, rate = state.limits.cost_curve, state.service_rate
    known = [] if rate.token_seconds is None else [rate.token_seconds]
    chunk = curve.efficient_prompt_tokens(EFFICIENT_SHARE)
    if chunk:
        known.append(curve.step_seconds(0, chunk) / chunk * state.pace.mixed)
    return min(known) * (1.0 - rate.cached_share) if known else None


def cancel(state: SchedulerState, request_id: RequestId) -> list[Event]:
    """End a request with CANCELLED; nothing happens when it is not live."""
    return _end(state, request_id, FinishReason.CANCELLED)


def finish_by_stop_string(state: SchedulerState, request_id: RequestId) -> list[Event]:
    """End a request with STOP because its text holds a stop string; nothing if not live."""
    return _end(state, request_id, FinishReason.STOP)


def cut_output(request: Request, num_output_tokens: int) -> None:
    """Drop a request's output tokens after the first so many.

    A step may give several tokens of which the text ends at an earlier one, by a stop string.
    Those after it were never generated. The request ends, or has ended.
    """
    del request.output_token_ids[num_output_tokens:]


def fail(state: SchedulerState, request_id: RequestId, detail: str) -> list[Event]:
    """End a request with ERROR and say why; nothing happens when it is not live."""
    return _end(state, request_id, FinishReason.ERROR, detail)


def expire(state: SchedulerState, now: float) -> list[Event]:
    """End all requests whose deadline is `now` (monotonic seconds) or earlier with DEADLINE."""
    state.now = max(state.now, now)
    expired = state.deadlines.pop_expired(state.requests, now)
    return [finish(state, request, FinishReason.DEADLINE) for request in expired]


def pause(state: SchedulerState, request_id: RequestId) -> None:
    """Plan no rows for a request until `resume`; it keeps its cached state while it may."""
    _set_paused(state, request_id, is_paused=True)


def resume(state: SchedulerState, request_id: RequestId) -> None:
    """Plan rows for a paused request again; nothing happens when it is not live."""
    _set_paused(state, request_id, is_paused=False)


def next_deadline(state: SchedulerState) -> float | None:
    """Return the earliest deadline of a live request in monotonic seconds, or None."""
    return state.deadlines.next_deadline(state.requests)


def _set_paused(state: SchedulerState, request_id: RequestId, *, is_paused: bool) -> None:
    request = state.requests.get(request_id)
    if request is not None:
        state.waiting.set_paused(request, is_paused=is_paused)


def _end(
    state: SchedulerState, request_id: RequestId, reason: FinishReason, detail: str = ""
) -> list[Event]:
    request = state.requests.get(request_id)
    if request is None:
        return []
    return [finish(state, request, reason, detail=detail)]
