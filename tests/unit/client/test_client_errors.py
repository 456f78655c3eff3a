"""Every gRPC status becomes one documented error, with the server's details."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from scheduler_service import client
from scheduler_service.client import Client, FieldViolation, GenerationParams
from scheduler_service.client._channel import Backoff
from scheduler_service.client._errors import ErrorDetails, error_from_rpc
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler


class Failure:
    """A failed call."""

    def __init__(self, code: grpc.StatusCode, trailers: object = None) -> None:
        self._code = code
        self._trailers = trailers

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the message."""
        return "why"

    def trailing_metadata(self) -> object:
        """Return the trailers."""
        return self._trailers


EXPECTED = {
    grpc.StatusCode.INVALID_ARGUMENT: client.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: client.InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: client.InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: client.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: client.AlreadyExistsError,
    grpc.StatusCode.UNAUTHENTICATED: client.AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: client.AccessDeniedError,
    grpc.StatusCode.UNAVAILABLE: client.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: client.DeadlineError,
    grpc.StatusCode.CANCELLED: client.RequestCancelledError,
    grpc.StatusCode.ABORTED: client.AbortedError,
    grpc.StatusCode.INTERNAL: client.ServerError,
    grpc.StatusCode.UNKNOWN: client.ServerError,
    grpc.StatusCode.UNIMPLEMENTED: client.ServerError,
    grpc.StatusCode.DATA_LOSS: client.ServerError,
}


@pytest.mark.parametrize(("code", "error_class"), EXPECTED.items())
def test_status_decides_the_class(code: grpc.StatusCode, error_class: type[Exception]) -> None:
    """The table in the module's docstring, checked."""
    error = error_from_rpc(Failure(code))
    assert type(error) is error_class
    words = {
        grpc.StatusCode.UNAVAILABLE: "[connect] the scheduler must stay there to the end, got it "
        "lost (why)",
        grpc.StatusCode.DEADLINE_EXCEEDED: "[call] the answer must end within the timeout, got "
        "none by then",
    }
    assert (error.code, str(error)) == (code.name, words.get(code, "why"))


def test_resource_exhausted_without_a_reason_is_the_message_limit() -> None:
    """gRPC itself refuses messages over its limit with this code; waiting would not help."""
    error = error_from_rpc(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert type(error) is client.InvalidRequestError
    assert str(error).startswith("[call] a message must fit gRPC's limit of size")


def test_unreadable_details_do_not_hide_the_status() -> None:
    """A broken trailer still leaves code and message."""
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    error = error_from_rpc(Failure(grpc.StatusCode.NOT_FOUND, trailers))
    assert type(error) is client.NotFoundError


def test_details_travel_from_server_to_exception(fake: FakeScheduler) -> None:
    """ErrorInfo, BadRequest and RetryInfo of one status all arrive."""

    def refuse(context: grpc.ServicerContext) -> None:
        request = error_details_pb2.BadRequest()
        request.field_violations.add(field="sampling.top_p", description="must be in (0, 1]")
        fake_scheduler.fail(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "[submit] the queue must have room",
            fake_scheduler.error_info("QUEUE_FULL", limit="4"),
            request,
            fake_scheduler.retry_info(0.25),
        )

    fake.before_unary = refuse
    with Client(fake.address) as connection, pytest.raises(client.OverloadedError) as caught:
        connection.list_models()
    error = caught.value
    assert error.reason == "QUEUE_FULL"
    assert error.metadata == {"limit": "4"}
    assert error.violations == (FieldViolation("sampling.top_p", "must be in (0, 1]"),)
    assert error.retry_after_seconds == 0.25


def test_context_length_has_its_own_class(fake: FakeScheduler) -> None:
    """A chat program wants to know this one, to shorten the conversation."""

    def refuse(context: grpc.ServicerContext) -> None:
        fake_scheduler.fail(
            context,
            grpc.StatusCode.INVALID_ARGUMENT,
            "too long",
            fake_scheduler.error_info("CONTEXT_LENGTH_EXCEEDED", context_length="2048"),
        )

    fake.before_unary = refuse
    with Client(fake.address) as connection, pytest.raises(client.ContextLengthError) as caught:
        connection.tokenize("x")
    assert caught.value.metadata == {"context_length": "2048"}


def test_message_over_the_limit_of_grpc(fake: FakeScheduler) -> None:
    """A prompt of five megabytes is refused by the transport, and called invalid."""
    with Client(fake.address) as connection, pytest.raises(client.InvalidRequestError):
        connection.complete("x" * 5_000_000, GenerationParams(max_tokens=1))


def test_backoff_follows_the_server_and_stops_in_time() -> None:
    """Waits that would end after the limit are not begun."""
    now = 100.0
    backoff = Backoff(1.0, clock=lambda: now)
    busy = client.UnavailableError("busy", ErrorDetails(retry_after_seconds=0.4))
    assert backoff.delay(busy) == 0.4
    now = 100.6
    assert backoff.delay(busy) == 0.4
    now = 100.7
    assert backoff.delay(busy) is None


@pytest.mark.parametrize(
    "error",
    [
        client.UnavailableError("no word when"),
        client.OverloadedError("full", ErrorDetails(retry_after_seconds=0.1)),
        client.ServerError("bug", ErrorDetails(retry_after_seconds=0.1)),
    ],
)
def test_backoff_gives_up_at_once(error: client.IsobatchError) -> None:
    """Only UNAVAILABLE with a time to come back is tried again by the SDK."""
    assert Backoff(10.0).delay(error) is None
