"""The ways in which a request loses its cached state. Shared by the verbs of the core."""

from __future__ import annotations

from scheduler_service.core.capacity import blocks_for
from scheduler_service.core.events import (
    PreemptionReason,
    RequestFinished,
    RequestPreempted,
)
from scheduler_service.core.request import FinishReason, Request, RequestInput
from scheduler_service.core.state import SchedulerState


def finish(
    state: SchedulerState,
    request: Request,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    detail: str = "",
) -> RequestFinished:
    """End a live request; the next batch gives its cached state back."""
    if state.running.pop(request.request_id, None) is None:
        state.waiting.remove(request.request_id)
    else:
        # Blocks come free, so a ceiling learnt from a refusal no longer tells the truth.
        state.block_ceiling = state.limits.num_blocks
        state.may_open_early = True
    _release(state, request)
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        state.output_lengths.record(request)
    del state.requests[request.request_id]
    request.apply_input(RequestInput.FINISH)
    request.finish_reason = reason
    return RequestFinished(
        request_id=request.request_id, reason=reason, stop_token_id=stop_token_id, detail=detail
    )


def preempt(state: SchedulerState, request: Request, reason: PreemptionReason) -> RequestPreempted:
    """Take the cached state of a running request; it waits again.

    The next batch gives the state back.
    """
    num_lost_tokens = request.num_computed_tokens
    del state.running[request.request_id]
    if not state.running:
        # Nobody must wait for ever below a ceiling that only an end would lift.
        state.block_ceiling = state.limits.num_blocks
    request.apply_input(RequestInput.PREEMPT)
    request.waiting_since = max(request.waiting_since, state.now)
    state.waiting.push(request)
    request.num_preemptions += 1
    _lose(state, request)
    return RequestPreempted(
        request_id=request.request_id, num_lost_tokens=num_lost_tokens, reason=reason
    )


def close(state: SchedulerState, request: Request) -> int:
    """Give up the cached positions of a waiting request; return how many there were.

    The next batch gives them back, and it may be opened again after that.
    """
    num_tokens = request.num_computed_tokens
    _lose(state, request)
    return num_tokens


def last_holder(state: SchedulerState) -> Request | None:
    """Return the last waiting request that keeps cached positions from others, or None.

    Paused ones, which nobody waits for, count as the last.
    """
    waiting = [
        *state.waiting.ordered(state.now),
        *(request for request in state.waiting if request.is_paused),
    ]
    holders = [request for request in waiting if request.num_computed_tokens]
    return holders[-1] if holders else None


def _lose(state: SchedulerState, request: Request) -> None:
    _release(state, request)
    request.generation += 1
    request.num_computed_tokens = 0
    request.num_cached_tokens = 0
    request.num_granted_tokens = 0
    request.provenance_handle = 0


def _release(state: SchedulerState, request: Request) -> None:
    request.prefix_wait = None
    if not request.is_announced:
        return
    request.is_announced = request.is_opened = False
    state.to_release.append(request.sequence_id)
    state.num_blocks_to_release += blocks_for(request.num_held_tokens, state.limits.block_size)
