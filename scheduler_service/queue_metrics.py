"""The queue in numbers: who waits, and why somebody was not taken."""

from scheduler_service.core import (
    CoreError,
    DeadlineUnreachableError,
    Priority,
    QueueFullError,
    SchedulerState,
)
from scheduler_service.metrics import ModelMetrics, RefusalReason, WaitingClass

_CLASSES = {priority: WaitingClass[priority.name] for priority in Priority}


def update_gauges(metrics: ModelMetrics, state: SchedulerState, num_paused: int) -> None:
    """Show the present state."""
    waiting = state.waiting
    metrics.requests_running.set(len(state.running))
    metrics.requests_waiting.set(len(waiting))
    for priority, count in waiting.num_by_priority().items():
        metrics.requests_waiting_by_class[_CLASSES[priority]].set(count)
    metrics.waiting_tokens.set(waiting.num_tokens)
    metrics.streams_paused.set(num_paused)


def refusal_reason(error: CoreError) -> RefusalReason:
    """Return the label of a refusal by the core."""
    if isinstance(error, QueueFullError):
        is_tokens = error.unit == "tokens"
        return RefusalReason.QUEUE_TOKENS if is_tokens else RefusalReason.QUEUE_REQUESTS
    if isinstance(error, DeadlineUnreachableError):
        return RefusalReason.DEADLINE_UNREACHABLE
    return RefusalReason.INVALID
