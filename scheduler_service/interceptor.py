"""Turns what a handler raises into a gRPC status with details."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from scheduler_service import logs, message_size
from scheduler_service.errors import InternalError, InvalidRequestError, ServiceError, to_status

_LOG = logs.get_logger(__name__)
_DETAILS_KEY = "grpc-status-details-bin"
# gRPC's own retry policy reads this trailer and not the RetryInfo of the details.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_NO_RETRY = "-1"

# Generic in the stubs alone.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Unusable:
    """Stands in for a request whose bytes are none, so that its handler can say why."""

    def __init__(self, why: str, reason: str) -> None:
        self.error = InvalidRequestError(why, field="", reason=reason)


async def abort(context: _Context, error: ServiceError) -> NoReturn:
    """End a call with the status of an error; as if cancelled, where its client is gone."""
    trailers: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, to_status(error).SerializeToString())]
    if error.retry_seconds is not None:
        trailers.append((_PUSHBACK_KEY, str(round(error.retry_seconds * 1000))))
    elif error.code is grpc.StatusCode.UNAVAILABLE:
        # Without a word gRPC would try by itself, and in the end say that nobody is there.
        trailers.append((_PUSHBACK_KEY, _NO_RETRY))
    try:
        await context.abort(error.code, error.message, tuple(trailers))
    except grpc.aio.InternalError as failure:
        # The client has left in this moment, and takes no status; gRPC would log a traceback.
        raise asyncio.CancelledError from failure
    raise AssertionError("[interceptor] abort must not return")


async def _abort_for(context: _Context, error: Exception) -> NoReturn:
    if isinstance(error, ServiceError):
        await abort(context, error)
    if isinstance(error, grpc.aio.AbortError):
        raise error
    error_id = uuid.uuid4().hex
    _LOG.error("handler_failed", error_id=error_id, exc_info=error)
    await abort(
        context,
        InternalError(
            f"[scheduler] internal error, id {error_id}", metadata={"error_id": error_id}
        ),
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors of the handlers of one service; others pass through untouched."""

    def __init__(self, service_name: str) -> None:
        """Handle the methods of `service_name`, a full protobuf name."""
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[_Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Return the handler with its errors mapped."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _map_unary(handler.unary_unary),
                _lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _map_stream(handler.unary_stream),
                _lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer that never raises: gRPC would answer UNKNOWN with its own words."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        if why := message_size.too_large("grpc", len(data)):
            return _Unusable(why, message_size.REASON)
        try:
            return deserialize(data)
        except DecodeError:
            why = "[grpc] a request must be a message of the contract, got bytes that are none"
            return _Unusable(why, "INVALID_MESSAGE")

    return read


def _check_decoded(request: object) -> None:
    if isinstance(request, _Unusable):
        raise request.error


def _map_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: object, context: _Context) -> object:
        try:
            _check_decoded(request)
            return await behavior(request, context)
        except Exception as error:
            await _abort_for(context, error)

    return call


def _map_stream(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: object, context: _Context) -> AsyncIterator[object]:
        try:
            _check_decoded(request)
            async with contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort_for(context, error)

    return call
