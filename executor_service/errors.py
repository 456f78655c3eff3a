"""Every error that the executor reports, as one tree.

    ExecutorError                    answers of the service; each has a gRPC status and a reason
      InvalidRequestError            INVALID_ARGUMENT     INVALID_REQUEST
        InvalidStepError             INVALID_ARGUMENT     INVALID_STEP
      ModelNotFoundError             NOT_FOUND            MODEL_NOT_FOUND
      RecordNotKeptError             NOT_FOUND            RECORD_NOT_KEPT
      SequenceNotOpenError           FAILED_PRECONDITION  SEQUENCE_NOT_OPEN
      StaleGenerationError           FAILED_PRECONDITION  STALE_GENERATION
      StepOutOfOrderError            FAILED_PRECONDITION  STEP_OUT_OF_ORDER
      LogitsNotKeptError             FAILED_PRECONDITION  LOGITS_NOT_KEPT
      StaleEpochError                FAILED_PRECONDITION  STALE_EPOCH
      SessionFencedError             ABORTED              SESSION_FENCED
      TooManySequencesError          RESOURCE_EXHAUSTED   TOO_MANY_SEQUENCES
      EngineBusyError                RESOURCE_EXHAUSTED   ENGINE_BUSY
      NotReadyError                  UNAVAILABLE          MODEL_LOADING
      DrainingError                  UNAVAILABLE          DRAINING
      EngineFailedError              INTERNAL             ENGINE_FAILED
    StartError                       the process cannot start; exit code 78
      ConfigError                    a flag, an environment variable or a path
      ModelError                     a model that is missing, damaged or of an unknown kind

Messages have the form `[op] rule, got X`. A full block pool is an outcome of a step, not an error.
"""

from __future__ import annotations

from typing import ClassVar

import grpc

ERROR_DOMAIN = "isobatch"


class ExecutorError(Exception):
    """An answer of the service that is not a result."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "ENGINE_FAILED"
    # Seconds after which asking again makes sense; None when it does not.
    retry_after_seconds: ClassVar[float | None] = None

    def __init__(self, message: str, metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})


class InvalidRequestError(ExecutorError):
    """A message breaks a rule of the contract."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class InvalidStepError(InvalidRequestError):
    """A Step breaks a rule of the contract; `field` names the message's field."""

    reason = "INVALID_STEP"

    def __init__(self, field: str, rule: str, got: object) -> None:
        super().__init__(f"[step] {field} {rule}, got {got}", {"field": field})
        self.field = field


class ModelNotFoundError(ExecutorError):
    """No loaded model has this id."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class RecordNotKeptError(ExecutorError):
    """Provenance was asked of a sequence that is not open, or by a handle that names nothing."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "RECORD_NOT_KEPT"


class SequenceNotOpenError(ExecutorError):
    """A token row names a sequence or a generation that is not open."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SEQUENCE_NOT_OPEN"


class StaleGenerationError(ExecutorError):
    """An Open names a generation below the one that is open."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_GENERATION"


class StepOutOfOrderError(ExecutorError):
    """A step id is neither the last one nor the next one."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_OUT_OF_ORDER"


class LogitsNotKeptError(ExecutorError):
    """Full logits were asked of a step or a position that did not keep them."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "LOGITS_NOT_KEPT"


class StaleEpochError(ExecutorError):
    """A session of a lower scheduler epoch than the last one, which the metadata has."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class SessionFencedError(ExecutorError):
    """Another session has taken over."""

    status = grpc.StatusCode.ABORTED
    reason = "SESSION_FENCED"


class TooManySequencesError(ExecutorError):
    """More open sequences than the executor keeps."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_SEQUENCES"
    retry_after_seconds = 1.0


class EngineBusyError(ExecutorError):
    """The engine's queue is full."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ENGINE_BUSY"
    retry_after_seconds = 0.1


class NotReadyError(ExecutorError):
    """The model is still being loaded."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "MODEL_LOADING"
    retry_after_seconds = 0.2


class DrainingError(ExecutorError):
    """The process is about to stop."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"
    retry_after_seconds = 1.0


class EngineFailedError(ExecutorError):
    """A bug of ours; the details are in the log, under the id in the metadata."""


class StartError(Exception):
    """The process cannot start as it was asked to."""


class ConfigError(StartError):
    """A flag, an environment variable or a path cannot be used."""


class ModelError(StartError):
    """A model is missing, damaged or of an unknown kind."""
