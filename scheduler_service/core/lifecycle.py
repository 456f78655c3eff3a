"""The two ways in which a request leaves the running set. Shared by the verbs of the core."""

from __future__ import annotations

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
        state.to_release.append(request.sequence_id)
        # Blocks come free, so a ceiling learnt from a refusal no longer tells the truth. As the
        # running set empties only here and by a restart, nobody waits below it for ever.
        state.block_ceiling = state.limits.num_blocks
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
    state.to_release.append(request.sequence_id)
    request.apply_input(RequestInput.PREEMPT)
    request.generation += 1
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    request.num_cached_tokens = 0
    return RequestPreempted(request_id=request.request_id, num_lost_tokens=num_lost_tokens)
