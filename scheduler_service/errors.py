"""Errors that end a call, and the gRPC status that each becomes.

```
ServiceError                      code, reason, metadata, violations, retry delay
├── InvalidRequestError           INVALID_ARGUMENT    INVALID_PARAMETER, INVALID_PROMPT,
│   │                                                 INVALID_MESSAGE, MESSAGE_TOO_LARGE
│   └── ContextLengthError        INVALID_ARGUMENT    CONTEXT_LENGTH_EXCEEDED
├── UnknownModelError             NOT_FOUND           UNKNOWN_MODEL
├── DuplicateIdError              ALREADY_EXISTS      DUPLICATE_REQUEST_ID
├── OverloadedError               RESOURCE_EXHAUSTED  QUEUE_FULL, DEADLINE_UNREACHABLE
├── SlowReaderError               RESOURCE_EXHAUSTED  SLOW_READER
├── NotServingError               UNAVAILABLE         EXECUTOR_UNAVAILABLE, DRAINING
├── ExecutorFailedError           UNAVAILABLE         EXECUTOR_FAILED
├── ExecutorChangedError          ABORTED             EXECUTOR_RESTARTED
├── DeadlineError                 DEADLINE_EXCEEDED   DEADLINE_EXCEEDED, DEADLINE_UNREACHABLE
└── InternalError                 INTERNAL            NON_FINITE_ROW, INTERNAL
ConfigurationError                (exit status 78) a flag or variable cannot be used
```
"""

from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from scheduler_service.core import errors as core_errors

DOMAIN = "isobatch"
RETRY_SECONDS = 0.5
# A status travels in HTTP/2 trailers, which gRPC bounds to 8 KiB; it holds a message up to three
# times as details and once percent-encoded, and a message may quote what a client sent.
MAX_MESSAGE_BYTES = 512


class ConfigurationError(Exception):
    """A flag or an environment variable cannot be used; the message says why."""


def _shortened(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_MESSAGE_BYTES:
        return text
    return data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


class ServiceError(Exception):
    """An error that ends a call."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        field: str = "",
        resource: tuple[str, str] | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        """Describe the error.

        `reason` is UPPER_SNAKE_CASE and stable for programs. `field` names the offending
        field of the request by its path, `resource` is (type, name) of what is missing,
        `retry_seconds` says when another attempt may succeed.
        """
        super().__init__(message)
        self.message = _shortened(message)
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field = field
        self.resource = resource and (resource[0], _shortened(resource[1]))
        self.retry_seconds = retry_seconds


class InvalidRequestError(ServiceError):
    """The request breaks a rule; `field` is empty where it is no one field's."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str, reason: str = "INVALID_PARAMETER") -> None:
        super().__init__(message, reason=reason, field=field)


class ContextLengthError(ServiceError):
    """The prompt leaves no room for a token."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, error: core_errors.PromptTooLongError) -> None:
        super().__init__(
            str(error),
            reason="CONTEXT_LENGTH_EXCEEDED",
            field="prompt",
            metadata={
                "num_prompt_tokens": str(error.num_prompt_tokens),
                "context_length": str(error.context_length),
                "pool_capacity": str(error.pool_capacity),
            },
        )


class UnknownModelError(ServiceError):
    """No such model."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, model: str, known: str) -> None:
        super().__init__(
            f"[model] must be {known!r} or empty, got {model!r}",
            reason="UNKNOWN_MODEL",
            resource=("model", model),
        )


class DuplicateIdError(ServiceError):
    """A live request has this id."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="DUPLICATE_REQUEST_ID", field="request_id")


class OverloadedError(ServiceError):
    """The waiting queue is at a bound, or too long for the deadline; later it may be shorter."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self, message: str, *, retry_seconds: float, reason: str, metadata: Mapping[str, str]
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata, retry_seconds=retry_seconds)


class SlowReaderError(ServiceError):
    """The client did not take its output."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(
            f"[generate] output must be read within {limit_seconds:g} s, got no read of what was "
            "there for so long",
            reason="SLOW_READER",
        )


class NotServingError(ServiceError):
    """The service cannot take or go on with requests at the moment."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, reason: str = "EXECUTOR_UNAVAILABLE") -> None:
        super().__init__(message, reason=reason, retry_seconds=RETRY_SECONDS)


class ExecutorFailedError(ServiceError):
    """The executor is given up by whoever starts it; trying again soon does not help."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="EXECUTOR_FAILED")


class ExecutorChangedError(ServiceError):
    """The executor came back with another model, so the request cannot go on."""

    code = grpc.StatusCode.ABORTED

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="EXECUTOR_RESTARTED")


class DeadlineError(ServiceError):
    """The deadline of the call passed, or is too near for the prompt alone."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(
        self,
        message: str = "[generate] the deadline of the call passed before the end",
        *,
        reason: str = "DEADLINE_EXCEEDED",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)


class InternalError(ServiceError):
    """The service failed; `reason` NON_FINITE_ROW means that the model's numbers did."""

    code = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, reason: str = "INTERNAL", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)


def from_core(error: core_errors.CoreError) -> ServiceError:
    """Return the error of a call for what the core refused."""
    if isinstance(error, core_errors.PromptTooLongError):
        return ContextLengthError(error)
    if isinstance(error, core_errors.QueueFullError):
        bound = "max_num_waiting" if error.unit == "requests" else "max_waiting_tokens"
        return OverloadedError(
            str(error),
            reason="QUEUE_FULL",
            metadata={bound: str(error.bound)},
            retry_seconds=error.retry_seconds,
        )
    if isinstance(error, core_errors.DeadlineUnreachableError):
        reason = "DEADLINE_UNREACHABLE"
        metadata = {
            "needed_seconds": f"{error.needed_seconds:.3f}",
            "left_seconds": f"{error.left_seconds:.3f}",
        }
        if error.retry_seconds is None:
            # No use in trying again: the prompt alone takes too long.
            return DeadlineError(str(error), reason=reason, metadata=metadata)
        return OverloadedError(
            str(error), reason=reason, metadata=metadata, retry_seconds=error.retry_seconds
        )
    if isinstance(error, core_errors.DuplicateRequestError):
        return DuplicateIdError(str(error))
    if isinstance(error, core_errors.InvalidParameterError):
        is_sampling = error.op == "sampling"
        path = f"sampling.{error.field}" if is_sampling else _FIELD_PATHS[error.field]
        return InvalidRequestError(str(error), field=path)
    return InternalError(f"[core] unexpected refusal: {error}")


# Fields of the core by their paths in the public request.
_FIELD_PATHS: Mapping[str, str] = {
    "prompt": "prompt",
    "max_tokens": "stopping.max_tokens",
    "num_samples": "num_samples",
}


def to_status(error: ServiceError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error: ErrorInfo always, then what else it says."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=error.message)

    def add(detail: object) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.resource is not None:
        kind, name = error.resource
        add(
            error_details_pb2.ResourceInfo(
                resource_type=kind, resource_name=name, description=error.message
            )
        )
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_seconds * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    return status
