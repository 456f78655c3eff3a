"""Errors become gRPC statuses with details; unexpected ones tell nothing but an id."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from executor_service import errors
from executor_service.statuses import abort, details_of

CLASSES = [
    each
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, errors.ExecutorError)
]


def _details(status: status_pb2.Status) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for detail in status.details:
        name = detail.type_url.rpartition(".")[2]
        message: Message = getattr(error_details_pb2, name)()
        assert detail.Unpack(message)
        found[name] = message
    return found


def _make(error: type[errors.ExecutorError]) -> errors.ExecutorError:
    if error is errors.InvalidStepError:
        return errors.InvalidStepError("token_ids", "must be there", 0)
    return error("[op] rule, got X", {"key": "value"})


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_names_its_status_and_reason(error: type[errors.ExecutorError]) -> None:
    made = _make(error)
    status = details_of(made)
    assert status.code == error.status.value[0]
    assert status.message == made.message
    info: Any = _details(status)["ErrorInfo"]
    assert (info.reason, info.domain) == (error.reason, "isobatch")
    assert info.metadata == made.metadata
    assert error.reason.isupper()
    assert len(error.reason) <= 63


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for error in CLASSES:
        assert error.__name__ in errors.__doc__
        if error is not errors.ExecutorError:
            assert error.reason in errors.__doc__


def test_field_violations_and_retries() -> None:
    found: Any = _details(details_of(errors.InvalidStepError("token_ids", "must be small", 9)))
    (violation,) = found["BadRequest"].field_violations
    assert violation.field == "step.token_ids"
    assert violation.description == "[step] token_ids must be small, got 9"
    retry: Any = _details(details_of(errors.NotReadyError("x")))["RetryInfo"]
    assert retry.retry_delay.ToMilliseconds() == 200
    assert "RetryInfo" not in _details(details_of(errors.StaleEpochError("x")))


class _Context:
    """Remembers how the call was ended."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.text = ""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self.code, self.text = code, details
        raise grpc.aio.AbortError


async def test_unexpected_errors_are_internal_and_keep_their_secrets() -> None:
    context: Any = _Context()
    with pytest.raises(grpc.aio.AbortError):
        await abort(context, ValueError("secret"))
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.text
