"""Errors of the SDK, and how a gRPC status becomes one.

IsobatchError
|-- InvalidRequestError        INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION
|   `-- ContextLengthError     reason CONTEXT_LENGTH_EXCEEDED; the limits are in `metadata`
|-- NotFoundError              NOT_FOUND (unknown model)
|-- AlreadyExistsError         ALREADY_EXISTS (request id in use)
|-- AccessDeniedError          UNAUTHENTICATED, PERMISSION_DENIED
|-- OverloadedError            RESOURCE_EXHAUSTED (queue full or too long for the deadline;
|                              reason SLOW_READER: the output was not read in time)
|-- UnavailableError           UNAVAILABLE, and no connection within the connect timeout
|-- DeadlineError              DEADLINE_EXCEEDED
|   `-- FirstTokenTimeoutError no token within the first-token timeout
|-- RequestCancelledError      CANCELLED, and a stream closed before its end
|-- AbortedError               ABORTED (the executor was lost and the request with it)
|-- ServerError                INTERNAL, UNKNOWN and the rest
`-- ProtocolError              the stream broke the contract
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import grpc

_DETAILS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request and the rule that it broke."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What the server said besides the message; empty where it said nothing."""

    code: str = ""  # name of the gRPC status code
    reason: str = ""  # UPPER_SNAKE_CASE, stable for programs
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_seconds: float | None = None
    resource: str = ""


class IsobatchError(Exception):
    """Base of the SDK's errors. `str()` is the message; the other fields are for programs."""

    def __init__(self, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details or ErrorDetails()

    @property
    def code(self) -> str:
        """Name of the gRPC status code, or empty where the error did not come from a server."""
        return self.details.code

    @property
    def reason(self) -> str:
        """The server's reason, UPPER_SNAKE_CASE, or empty."""
        return self.details.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the server adds to its reason, such as limits."""
        return self.details.metadata

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The fields that broke a rule."""
        return self.details.violations

    @property
    def retry_after_seconds(self) -> float | None:
        """How long the server asks to wait before another attempt."""
        return self.details.retry_after_seconds


class InvalidRequestError(IsobatchError):
    """The request breaks a rule; sending it again will not help."""


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context."""


class NotFoundError(IsobatchError):
    """The model is not known."""


class AlreadyExistsError(IsobatchError):
    """The request id is in use."""


class AccessDeniedError(IsobatchError):
    """The server does not accept this caller."""


class OverloadedError(IsobatchError):
    """A bounded queue of the server is full."""


class UnavailableError(IsobatchError):
    """Nobody answers, or the server cannot serve yet."""


class DeadlineError(IsobatchError):
    """The call's timeout ended before the answer did."""


class FirstTokenTimeoutError(DeadlineError):
    """No token came within the first-token timeout."""


class RequestCancelledError(IsobatchError):
    """The request was cancelled before it ended."""


class AbortedError(IsobatchError):
    """The server gave the request up after tokens had been sent."""


class ServerError(IsobatchError):
    """The server failed: a bug, or a version that does not know the call."""


class ProtocolError(IsobatchError):
    """The server's stream broke the contract."""


class RpcFailure(Protocol):
    """What the errors of both gRPC stacks have in common."""

    def code(self) -> grpc.StatusCode:
        """Return the status code."""

    def details(self) -> str | None:
        """Return the message."""

    def trailing_metadata(self) -> Any:
        """Return the trailers, pairs of key and value, or None."""


_CLASSES: Final[Mapping[grpc.StatusCode, type[IsobatchError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.ABORTED: AbortedError,
}


def error_from_rpc(failure: RpcFailure) -> IsobatchError:
    """Return the SDK's error for a failed call of either gRPC stack."""
    code = failure.code()
    message = failure.details() or code.name
    details = ErrorDetails(code=code.name)
    for key, value in failure.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            details = _parse_details(value, details)
    error_class = _CLASSES.get(code, ServerError)
    if details.reason == "CONTEXT_LENGTH_EXCEEDED":
        error_class = ContextLengthError
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and not details.reason:
        # Our server always gives a reason; without one it is gRPC's own limit on message size.
        error_class = InvalidRequestError
        message = f"[call] a message must fit gRPC's limit of size, got a larger one ({message})"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and not details.reason:
        # The clock of this side was quicker than the server's answer.
        message = "[call] the answer must end within the timeout, got none by then"
    elif code is grpc.StatusCode.UNAVAILABLE and not details.reason:
        # gRPC's own words for a server that is gone, such as "Socket closed".
        message = f"[connect] the scheduler must stay there to the end, got it lost ({message})"
    return error_class(message, details)


def _parse_details(serialized: bytes, details: ErrorDetails) -> ErrorDetails:
    """Add the google.rpc details of a status to `details`; unknown kinds are passed over."""
    # Imported here: most programs never see an error, and these modules take time to load.
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    try:
        status = status_pb2.Status.FromString(serialized)
        for item in status.details:
            info = error_details_pb2.ErrorInfo()
            request = error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            resource = error_details_pb2.ResourceInfo()
            if item.Unpack(info):
                details = replace(details, reason=info.reason, metadata=dict(info.metadata))
            elif item.Unpack(request):
                found = tuple(
                    FieldViolation(each.field, each.description)
                    for each in request.field_violations
                )
                details = replace(details, violations=details.violations + found)
            elif item.Unpack(retry):
                delay = retry.retry_delay
                details = replace(details, retry_after_seconds=delay.seconds + delay.nanos / 1e9)
            elif item.Unpack(resource):
                details = replace(details, resource=resource.resource_name)
    except DecodeError:
        # Details that cannot be read must not hide the status itself.
        return details
    return details
