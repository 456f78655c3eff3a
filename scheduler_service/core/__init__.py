"""The scheduler's decisions as a pure state machine.

`submit`, `cancel`, `expire`, ... bring requests in and out; `openings` names those to announce to
the executor and `opened` takes its answers; `plan` chooses the token rows of a step; `apply` folds
its answer back and returns events. Synchronous and deterministic, standard library only: no clock
(time arrives as an argument), no I/O, no logger.
"""

from scheduler_service.core.admission import (
    cancel,
    cut_output,
    expire,
    fail,
    finish_by_stop_string,
    next_deadline,
    pause,
    resume,
    submit,
)
from scheduler_service.core.ahead import may_plan_ahead, plan_ahead
from scheduler_service.core.apply import (
    apply,
    capacity_refused,
    executor_restarted,
    record_kv_counts,
    record_step_seconds,
    source_refused,
)
from scheduler_service.core.batch import (
    LITERAL,
    KvCounts,
    SampledRow,
    SequenceOpened,
    SequenceOpening,
    TokenRow,
    TokenRowBatch,
    TokenSource,
    TokenSourceKind,
    WantedPosition,
)
from scheduler_service.core.cost_curve import NO_CURVE, CostCurve, CostPoint
from scheduler_service.core.errors import (
    CoreError,
    DeadlineUnreachableError,
    DuplicateRequestError,
    InvalidParameterError,
    InvalidTransitionError,
    PromptTooLongError,
    QueueFullError,
)
from scheduler_service.core.events import (
    Event,
    PreemptionReason,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenEmitted,
)
from scheduler_service.core.openings import opened, openings
from scheduler_service.core.params import SamplingParams
from scheduler_service.core.plan import plan
from scheduler_service.core.request import (
    FinishReason,
    Priority,
    Request,
    RequestId,
    RequestStatus,
    SequenceId,
)
from scheduler_service.core.state import Limits, SchedulerState

__all__ = [
    "LITERAL",
    "NO_CURVE",
    "CoreError",
    "CostCurve",
    "CostPoint",
    "DeadlineUnreachableError",
    "DuplicateRequestError",
    "Event",
    "FinishReason",
    "InvalidParameterError",
    "InvalidTransitionError",
    "KvCounts",
    "Limits",
    "PreemptionReason",
    "Priority",
    "PromptTooLongError",
    "QueueFullError",
    "Request",
    "RequestAdmitted",
    "RequestFinished",
    "RequestId",
    "RequestPreempted",
    "RequestStatus",
    "SampledRow",
    "SamplingParams",
    "SchedulerState",
    "SequenceId",
    "SequenceOpened",
    "SequenceOpening",
    "TokenEmitted",
    "TokenRow",
    "TokenRowBatch",
    "TokenSource",
    "TokenSourceKind",
    "WantedPosition",
    "apply",
    "cancel",
    "capacity_refused",
    "cut_output",
    "executor_restarted",
    "expire",
    "fail",
    "finish_by_stop_string",
    "may_plan_ahead",
    "next_deadline",
    "opened",
    "openings",
    "pause",
    "plan",
    "plan_ahead",
    "record_kv_counts",
    "record_step_seconds",
    "resume",
    "source_refused",
    "submit",
]
