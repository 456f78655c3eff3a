"""Errors as gRPC statuses with details (google.rpc.Status)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from executor_service import logs
from executor_service.errors import (
    ERROR_DOMAIN,
    EngineFailedError,
    ExecutorError,
    InvalidStepError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

_LOG = logs.get_logger(__name__)


def details_of(error: ExecutorError) -> status_pb2.Status:
    """Return the status message: ErrorInfo always, RetryInfo and BadRequest where they apply."""
    metadata = {key: str(value) for key, value in error.metadata.items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    ]
    if error.retry_after_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(retry)
    if isinstance(error, InvalidStepError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=f"step.{error.field}", description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.status.name),
        message=error.message,
        details=[_packed(detail) for detail in details],
    )


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the error's status; an unexpected error is logged under an id."""
    if not isinstance(error, ExecutorError):
        error_id = uuid.uuid4().hex[:12]
        _LOG.error("unexpected error", error_id=error_id, exc_info=error)
        error = EngineFailedError(
            "[engine] a request must not fail inside, got an error that the log has under "
            f"{error_id}",
            {"error_id": error_id},
        )
    status = rpc_status.to_status(details_of(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
    raise AssertionError("[statuses] abort raises")
