"""The synchronous face of the SDK."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from isobatch.scheduler.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc
from scheduler_service import runtime_paths
from scheduler_service.client import _convert
from scheduler_service.client._assembly import Assembly
from scheduler_service.client._channel import (
    HEALTH_METHOD,
    Backoff,
    deadline_after,
    no_connection,
    sync_channel_options,
)
from scheduler_service.client._errors import FirstTokenTimeoutError, error_from_rpc
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


class GenerationStream:
    """The events of one request: an iterator and a context manager.

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
        self._closed = threading.Event()
        self._timed_out = False
        self._first_token_timeout = first_token_timeout
        self._timer: threading.Timer | None = None
        self._call = start(request)
        if first_token_timeout is not None:
            self._timer = threading.Timer(
                min(first_token_timeout, threading.TIMEOUT_MAX), self._expire
            )
            self._timer.daemon = True
            self._timer.start()

    @property
    def request_id(self) -> str:
        """Identity of the request, for `Client.cancel`."""
        return self._request.request_id

    @property
    def accepted(self) -> Accepted | None:
        """What the server said it will use; None before it said so."""
        return self._assembly.accepted

    @property
    def text(self) -> str:
        """The text so far; with several samples, that of the first."""
        return self._assembly.text

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                response = next(self._call)
            except StopIteration:
                self.close()
                self._assembly.check_ended()
                break
            except grpc.RpcError as failure:
                self._recover(failure)
                continue
            except BaseException:
                # Ctrl-C, above all: nobody will read the rest, so the server need not compute it.
                self.close()
                raise
            event = self._take(response)
            if event is not None:
                return event
        raise StopIteration

    def completion(self) -> Completion:
        """Read the rest of the stream and return the whole answer (of the first sample)."""
        for _ in self:
            pass
        return self._assembly.completion()

    def completions(self) -> tuple[Completion, ...]:
        """Read the rest of the stream and return the answers of all samples."""
        for _ in self:
            pass
        return self._assembly.completions()

    def close(self) -> None:
        """Cancel the request unless it has ended. Safe to call from any thread, and twice."""
        self._closed.set()
        self._stop_timer()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop_timer()

    def _take(self, response: scheduler_service_pb2.GenerateResponse) -> Event | None:
        try:
            event = _convert.event(response)
            event = self._assembly.fold(event) if event is not None else None
        except BaseException:
            self.close()
            raise
        if self._assembly.has_output:
            self._stop_timer()
        return event

    def _recover(self, failure: grpc.RpcError) -> None:
        """Start the call again where that is allowed; raise the SDK's error where it is not."""
        if self._closed.is_set():
            return
        if self._timed_out:
            self.close()
            raise FirstTokenTimeoutError(
                "[generate] the first token must come within "
                f"{self._first_token_timeout:g} s, got none"
            ) from None
        error = error_from_rpc(failure)
        delay = None if self._assembly.has_output else self._backoff.delay(error)
        if delay is None:
            self.close()
            raise error from failure
        if self._assembly.accepted is not None:
            # The caller may have been told this seed already.
            self._request.sampling.seed = self._assembly.accepted.seed
        self._closed.wait(delay)
        if not self._closed.is_set() and not self._timed_out:
            self._call = self._start(self._request)

    def _expire(self) -> None:
        self._timed_out = True
        self._call.cancel()

    def _stop_timer(self) -> None:
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()


class Client:
    """A connection to a scheduler. Thread-safe; use it as a context manager or call `close()`.

    `address` is `unix:PATH` or `host:port`; None means the scheduler of this user on this machine.
    `model` is the model of requests that name none; empty means the server's default.
    `connect_timeout` bounds the wait for the connection, `first_token_timeout` the wait for a
    request's first token (None waits as long as the server does), and `retry_seconds` how long
    UNAVAILABLE is tried again, all in seconds.
    """

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
        options = sync_channel_options(self.address)
        self._channel = (
            grpc.insecure_channel(self.address, options)
            if credentials is None
            else grpc.secure_channel(self.address, credentials, options)
        )
        self._stub = scheduler_service_pb2_grpc.SchedulerServiceStub(self._channel)
        self._connected = False

    def connect(self) -> None:
        """Wait for the connection; every call does so by itself.

        Raises UnavailableError when there is none within the connect timeout.
        """
        if self._connected:
            return
        # Any answer will do, also that the server does not know the method. gRPC's own
        # channel_ready_future leaves a thread behind that delays `close()` by 0.2 s.
        probe = self._channel.unary_unary(HEALTH_METHOD, bytes, bytes)
        try:
            probe(b"", timeout=self._connect_timeout, wait_for_ready=True)
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise no_connection(self.address, self._connect_timeout) from None
        self._connected = True

    def generate(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> GenerationStream:
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
        self.connect()
        deadline = deadline_after(timeout, time.monotonic())

        def start(message: scheduler_service_pb2.GenerateRequest) -> Any:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            return self._stub.Generate(message, timeout=left)

        return GenerationStream(
            start,
            request,
            retry_seconds=self._retry_seconds,
            first_token_timeout=self._first_token_timeout,
        )

    def complete(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Completion:
        """Ask for text and return the whole answer; the arguments are those of `generate`."""
        with self.generate(
            prompt, params, model=model, request_id=request_id, timeout=timeout
        ) as stream:
            return stream.completion()

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: GenerationParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> GenerationStream:
        """Ask for the next turn of a conversation; the arguments are those of `generate`."""
        return self.generate(
            tuple(messages), params, model=model, request_id=request_id, timeout=timeout
        )

    def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request by its id; return whether it was live."""
        request = _convert.cancel_request(request_id)
        return self._call(self._stub.Cancel, request, timeout).was_live

    def list_models(self, *, timeout: float | None = None) -> tuple[ModelInfo, ...]:
        """Return the models of the server, the default first."""
        request = scheduler_service_pb2.ListModelsRequest()
        return _convert.model_infos(self._call(self._stub.ListModels, request, timeout))

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Tokenization:
        """Return the token ids that `generate` would use for a text or a conversation."""
        request = _convert.tokenize_request(prompt, model=self._model if model is None else model)
        return _convert.tokenization(self._call(self._stub.Tokenize, request, timeout))

    def stats(self, *, timeout: float | None = None) -> Stats:
        """Return counts of the server's live state."""
        request = scheduler_service_pb2.GetStatsRequest()
        return _convert.stats(self._call(self._stub.GetStats, request, timeout))

    def close(self) -> None:
        """Close the connection; streams that still run end with RequestCancelledError."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self, method: Callable[..., _Response], request: object, timeout: float | None
    ) -> _Response:
        self.connect()
        backoff = Backoff(self._retry_seconds)
        deadline = deadline_after(timeout, time.monotonic())
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return method(request, timeout=left)
            except grpc.RpcError as failure:
                error = error_from_rpc(failure)
                delay = backoff.delay(error)
                if delay is None:
                    raise error from failure
            time.sleep(delay)
