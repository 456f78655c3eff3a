"""The asyncio face of the SDK: the same calls as the synchronous one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from isobatch.scheduler.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc
from scheduler_service import runtime_paths
from scheduler_service.client import _convert
from scheduler_service.client._assembly import Assembly
from scheduler_service.client._channel import (
    Backoff,
    channel_options,
    deadline_after,
    no_connection,
)
from scheduler_service.client._errors import (
    FirstTokenTimeoutError,
    RequestCancelledError,
    error_from_rpc,
)
from scheduler_service.client._models import (
    Accepted,
    ChatMessage,
    Completion,
    Event,
    GenerationParams,
    ModelInfo,
    Prompt,
    Stats,
    Tokenization,
)

_Response = TypeVar("_Response")


class AsyncGenerationStream:
    """The events of one request: an asynchronous iterator and context manager.

    Leaving the context, `close()` and dropping the stream cancel the request at the server. Errors
    are those of `scheduler_service.client`; an iteration ends after Finished, or after `close()`.
    """

    def __init__(
        self,
        start: Callable[[scheduler_service_pb2.GenerateRequest], Any],
        request: scheduler_service_pb2.GenerateRequest,
        *,
        retry_seconds: float,
        first_token_timeout: float | None,
    ) -> None:
        self._start = start
        self._request = request
        self._assembly = Assembly()
        self._backoff = Backoff(retry_seconds)
        self._closed = asyncio.Event()
        self._first_token_timeout = first_token_timeout
        self._first_token_at = (
            None
            if first_token_timeout is None
            else asyncio.get_running_loop().time() + first_token_timeout
        )
        self._call = start(request)

    @property
    def request_id(self) -> str:
        """Identity of the request, for `AsyncClient.cancel`."""
        return self._request.request_id

    @property
    def accepted(self) -> Accepted | None:
        """What the server said it will use; None before it said so."""
        return self._assembly.accepted

    @property
    def text(self) -> str:
        """The text so far; with several samples, that of the first."""
        return self._assembly.text

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        limit = None if self._assembly.has_output else self._first_token_at
        try:
            async with asyncio.timeout_at(limit):
                event = await self._next_event()
        except TimeoutError:
            self.close()
            raise FirstTokenTimeoutError(
                "[generate] the first token must come within "
                f"{self._first_token_timeout:g} s, got none"
            ) from None
        except BaseException:
            # A cancelled task, above all: nobody will read the rest.
            self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def completion(self) -> Completion:
        """Read the rest of the stream and return the whole answer (of the first sample)."""
        async for _ in self:
            pass
        return self._assembly.completion()

    async def completions(self) -> tuple[Completion, ...]:
        """Read the rest of the stream and return the answers of all samples."""
        async for _ in self:
            pass
        return self._assembly.completions()

    def close(self) -> None:
        """Cancel the request unless it has ended. Safe to call twice."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _next_event(self) -> Event | None:
        """Return the next event, or None at the end."""
        while not self._closed.is_set():
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as failure:
                await self._recover(failure)
                continue
            except asyncio.CancelledError:
                # gRPC raises this also for a call cancelled by close() or with its channel.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                if self._closed.is_set():
                    return None
                raise RequestCancelledError(
                    "[generate] the client must stay open while it streams, got closed"
                ) from None
            if not isinstance(response, scheduler_service_pb2.GenerateResponse):
                # gRPC's mark of the end of a stream.
                self.close()
                self._assembly.check_ended()
                return None
            event = _convert.event(response)
            event = self._assembly.fold(event) if event is not None else None
            if event is not None:
                return event
        return None

    async def _recover(self, failure: grpc.aio.AioRpcError) -> None:
        """Start the call again where that is allowed; raise the SDK's error where it is not."""
        error = error_from_rpc(failure)
        delay = None if self._assembly.has_output else self._backoff.delay(error)
        if delay is None:
            raise error from failure
        if self._assembly.accepted is not None:
            # The caller may have been told this seed already.
            self._request.sampling.seed = self._assembly.accepted.seed
        await asyncio.sleep(delay)
        if not self._closed.is_set():
            self._call = self._start(self._request)


class AsyncClient:
    """A connection to a scheduler, for one event loop; see `Client` for the arguments."""

    def __init__(
        self,
        address: str | None = None,
        *,
        model: str = "",
        connect_timeout: float = 5.0,
        first_token_timeout: float | None = None,
        retry_seconds: float = 10.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address or runtime_paths.default_scheduler_address()
        self._model = model
        self._connect_timeout = connect_timeout
        self._first_token_timeout = first_token_timeout
        self._retry_seconds = retry_seconds
        options = channel_options(self.address)
        self._channel = (
            grpc.aio.insecure_channel(self.address, options)
            if credentials is None
            else grpc.aio.secure_channel(self.address, credentials, options)
        )
        self._stub = scheduler_service_pb2_grpc.SchedulerServiceStub(self._channel)
        self._connected = False

    async def connect(self) -> None:
        """Wait for the connection; every call does so by itself.

        Raises UnavailableError when there is none within the connect timeout.
        """
        if self._connected:
            return
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._channel.channel_ready()
        except TimeoutError:
            raise no_connection(self.address, self._connect_timeout) from None
        self._connected = True

    async def generate(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> AsyncGenerationStream:
        """Ask for text and return the stream of its events.

        `timeout` is the deadline of the whole answer in seconds. `request_id` is a new UUID unless
        given. Raises InvalidRequestError and UnavailableError here, other errors in the iteration.
        """
        request = _convert.generate_request(
            prompt,
            params or GenerationParams(),
            model=self._model if model is None else model,
            request_id=request_id or str(uuid.uuid4()),
        )
        await self.connect()
        clock = asyncio.get_running_loop().time
        deadline = deadline_after(timeout, clock())

        def start(message: scheduler_service_pb2.GenerateRequest) -> Any:
            left = None if deadline is None else max(0.0, deadline - clock())
            return self._stub.Generate(message, timeout=left)

        return AsyncGenerationStream(
            start,
            request,
            retry_seconds=self._retry_seconds,
            first_token_timeout=self._first_token_timeout,
        )

    async def complete(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> Completion:
        """Ask for text and return the whole answer; the arguments are those of `generate`."""
        async with await self.generate(
            prompt, params, model=model, request_id=request_id, timeout=timeout
        ) as stream:
            return await stream.completion()

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> AsyncGenerationStream:
        """Ask for the next turn of a conversation; the arguments are those of `generate`."""
        return await self.generate(
            tuple(messages), params, model=model, request_id=request_id, timeout=timeout
        )

    async def cancel(
        self,
        request_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> bool:
        """End a request by its id; return whether it was live."""
        request = _convert.cancel_request(request_id)
        return (await self._unary(self._stub.Cancel, request, timeout)).was_live

    async def list_models(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> tuple[ModelInfo, ...]:
        """Return the models of the server, the default first."""
        request = scheduler_service_pb2.ListModelsRequest()
        return _convert.model_infos(await self._unary(self._stub.ListModels, request, timeout))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> Tokenization:
        """Return the token ids that `generate` would use for a text or a conversation."""
        request = _convert.tokenize_request(prompt, model=self._model if model is None else model)
        return _convert.tokenization(await self._unary(self._stub.Tokenize, request, timeout))

    async def stats(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> Stats:
        """Return counts of the server's live state."""
        request = scheduler_service_pb2.GetStatsRequest()
        return _convert.stats(await self._unary(self._stub.GetStats, request, timeout))

    async def close(self) -> None:
        """Close the connection; streams that still run end with RequestCancelledError."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _unary(
        self,
        method: Callable[..., Awaitable[_Response]],
        request: object,
        timeout: float | None,  # noqa: ASYNC109  # the deadline travels to the server
    ) -> _Response:
        await self.connect()
        backoff = Backoff(self._retry_seconds)
        clock = asyncio.get_running_loop().time
        deadline = deadline_after(timeout, clock())
        while True:
            left = None if deadline is None else max(0.0, deadline - clock())
            try:
                return await method(request, timeout=left)
            except grpc.aio.AioRpcError as failure:
                error = error_from_rpc(failure)
                delay = backoff.delay(error)
                if delay is None:
                    raise error from failure
            await asyncio.sleep(delay)
