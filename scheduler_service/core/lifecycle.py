"""The ways in which a request loses its cached state. Shared by the verbs of the core."""

from __future__ import annotations

from scheduler_service.core.capacity import blocks_for
from scheduler_service.core.events import RequestFinished, RequestPreempted
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
        # Blocks come free, so a ceiling learnt from a refusal no longer tells the truth. As the
        # running set empties only here and by a restart, nobody waits below it for ever.
        state.block_ceiling = state.limits.num_blocks
        state.may_open_early = True
    _release(state, request)
    del state.requests[request.request_id]
    request.apply_input(RequestInput.FINISH)
    request.finish_reason = reason
    return RequestFinished(
        request_id=request.request_id, reason=reason, stop_token_id=stop_token_id, detail=detail
    )


def preempt(state: SchedulerState, request: Request) -> RequestPreempted:
    """Take the cached state of the last running request; it waits before all others.

    The next batch gives the state back.
    """
    num_lost_tokens = request.num_computed_tokens
    del state.running[request.request_id]
    state.waiting.push_front(request)
    request.apply_input(RequestInput.PREEMPT)
    request.num_preemptions += 1
    _lose(state, request)
    return RequestPreempted(request_id=request.request_id, num_lost_tokens=num_lost_tokens)


def close(state: SchedulerState, request: Request) -> int:
    """Give up the cached positions of a waiting request; return how many there were.

    The next batch gives them back, and it may be opened again after that.
    """
    num_tokens = request.num_computed_tokens
    _lose(state, request)
    return num_tokens


def last_holder(state: SchedulerState) -> Request | None:
    """Return the last waiting request that keeps cached positions from others, or None."""
    holders = [request for request in state.waiting if request.num_computed_tokens]
    return holders[-1] if holders else None


def _lose(state: SchedulerState, request: Request) -> None:
    _release(state, request)
    request.generation += 1
    request.num_computed_tokens = 0
    request.num_cached_tokens = 0
    request.provenance_handle = 0


def _release(state: SchedulerState, request: Request) -> None:
    request.prefix_wait = None
    if not request.is_announced:
        return
    request.is_announced = request.is_opened = False
    state.to_release.append(request.sequence_id)
    state.num_blocks_to_release += blocks_for(request.num_computed_tokens, state.limits.block_size)
