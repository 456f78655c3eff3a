"""The connection to the executor: one attempt to connect, and the session that comes of it.

When and how often to try, and what a new session means for requests, is decided by the step
loop. Two facts matter to it: `executor_epoch` (another one means that every cached key and
value is gone) and whether the session goes on where the last one broke off. To go on, the
client opens the session with the scheduler epoch of the broken one; an executor that still
has that state then answers a repeated step from memory.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch.executor.v1 import provenance_pb2, token_rows_pb2
from scheduler_service.text.tokenizer import TokenizerSource
from scheduler_service.wire import executor as wire
from scheduler_service.wire import trace as wire_trace
from scheduler_service.wire.capabilities import (
    Capabilities,
    WireError,
    read_capabilities,
    read_tokenizer,
)

if TYPE_CHECKING:
    from isobatch.executor.v1.executor_service_pb2_grpc import ExecutorServiceAsyncStub

_DETAILS_KEY = "grpc-status-details-bin"
# Together a few seconds of the clock that epochs begin with.
_LEAST_GAP, _GAP_BITS = 10_000, 32
_MAX_MESSAGE_BYTES = 64 << 20
_CALL_TIMEOUT_SECONDS = 10.0
_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Connections are ours to retry, each on a channel of its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


class ExecutorUnavailableError(Exception):
    """No session could be opened: nobody answers, or something went wrong on the way."""


class ExecutorLoadingError(ExecutorUnavailableError):
    """The executor answers, and is not ready yet."""


class SessionLostError(Exception):
    """The session's stream ended."""


class SessionRefusedError(Exception):
    """The executor refused a message of the session: the state is not what we think it is."""


class StaleEpochError(SessionRefusedError):
    """The executor has had a session of a higher epoch, `last_epoch`; 0 where it does not say.

    `is_taken` is False where it says that nobody has that session any more.
    """

    def __init__(self, message: str, last_epoch: int, *, is_taken: bool) -> None:
        super().__init__(message)
        self.last_epoch = last_epoch
        self.is_taken = is_taken


# Generic in the stubs alone.
_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]"


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """What an executor says about itself, and the text side of its default model."""

    capabilities: Capabilities
    tokenizer: TokenizerSource


class ExecutorSession:
    """One live session. Answers come in the order of the requests."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: _Call,
        description: ExecutorDescription,
        *,
        scheduler_epoch: int,
        answer_seconds: float,
    ) -> None:
        """Take over an open channel and call; `close` ends both.

        An answer that takes longer than `answer_seconds` counts as lost with its session.
        """
        self.description = description
        self.scheduler_epoch = scheduler_epoch
        self._answer_seconds = answer_seconds
        self._channel = channel
        self._call = call
        # Under way while the session is idle, so that its end is noticed.
        self._next_read: asyncio.Future[pb.SessionResponse] | None = None

    async def write(self, message: pb.SessionRequest) -> None:
        """Send a message; raises SessionLostError."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._lost(error) from error

    async def read(self) -> pb.SessionResponse:
        """Return the next answer; raises SessionLostError."""
        try:
            async with asyncio.timeout(self._answer_seconds):
                under_way, self._next_read = self._next_read, None
                # A task of its own would cost every answer a round of the event loop.
                return await (under_way or self._read())
        except TimeoutError:
            raise SessionLostError(
                f"[session] an answer must come within {self._answer_seconds:g} s, got none"
            ) from None

    async def provenance_piece(
        self, sequence_id: int, generation: int, num_positions: int, include_digests: bool
    ) -> bytes | None:
        """Return who wrote the first positions of an open sequence's cache, as a piece of a trace.

        None where the executor does not say, be it an older one or one that has just gone.
        """
        request = provenance_pb2.GetProvenanceRequest(
            sequence=token_rows_pb2.SequenceKey(sequence_id=sequence_id, generation=generation),
            include_digests=include_digests,
            num_positions=num_positions,
        )
        stub = pb_grpc.ExecutorServiceStub(self._channel)
        try:
            reply = await stub.GetProvenance(request, timeout=self._answer_seconds)
        except grpc.aio.AioRpcError:
            return None
        return wire_trace.kv(generation, reply)

    async def idle(self, wake: asyncio.Event, timeout_seconds: float | None) -> None:
        """Return when `wake` is set or the time is over; raises SessionLostError."""
        if self._next_read is None:
            self._next_read = asyncio.ensure_future(self._read())
        waiter = asyncio.ensure_future(wake.wait())
        either: set[asyncio.Future[Any]] = {waiter, self._next_read}
        try:
            done, _ = await asyncio.wait(
                either,
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiter.cancel()
        if self._next_read in done:
            await self._next_read
            raise SessionLostError("[session] the executor sent an answer that nobody asked for")

    async def _read(self) -> pb.SessionResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error) from error
        if isinstance(response, pb.SessionResponse):
            return response
        raise await self._lost(None)

    async def _lost(self, error: Exception | None) -> SessionLostError | SessionRefusedError:
        if not isinstance(error, grpc.aio.AioRpcError):
            with contextlib.suppress(asyncio.CancelledError):
                code, details = await self._call.code(), await self._call.details()
                return _classify(code, details, await self._call.trailing_metadata())
            return SessionLostError("[session] the call was cancelled")
        return _classify(error.code(), error.details(), error.trailing_metadata())

    async def close(self) -> None:
        """End the session and its channel."""
        self._call.cancel()
        if self._next_read is not None:
            self._next_read.cancel()
            with contextlib.suppress(asyncio.CancelledError, SessionLostError, SessionRefusedError):
                await self._next_read
        await self._channel.close(None)


def _classify(
    code: grpc.StatusCode, details: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> SessionLostError | SessionRefusedError:
    message = f"[session] the stream ended with {code.name}: {details or ''}"
    info = _error_info(trailers or ())
    if info.reason == "STALE_EPOCH":
        last = info.metadata.get("scheduler_epoch", "")
        return StaleEpochError(
            message,
            int(last) if last.isdecimal() else 0,
            is_taken=info.metadata.get("has_session", "true") != "false",
        )
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED):  # fmt: skip
        return SessionRefusedError(message)
    return SessionLostError(message)


def _error_info(trailers: Iterable[tuple[str, str | bytes]]) -> error_details_pb2.ErrorInfo:
    """Return the reason in a status; an empty one where there is none."""
    info = error_details_pb2.ErrorInfo()
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                any(each.Unpack(info) for each in status_pb2.Status.FromString(value).details)
    return info


class ExecutorClient:
    """Opens sessions with the executor at one address."""

    def __init__(self, address: str, answer_seconds: float = 60.0) -> None:
        """Connect to `address` (`unix:PATH` or `host:port`) when asked to.

        Its sessions wait at most `answer_seconds` for an answer.
        """
        self._address = address
        self._answer_seconds = answer_seconds
        # Above that of any scheduler before this one, if the clock is right; see `connect`.
        self._last_epoch = time.time_ns()
        self._has_had_session = False
        self._known: ExecutorDescription | None = None

    async def connect(self, resume: ExecutorSession | None = None) -> ExecutorSession:
        """Try once to open a session.

        With `resume`, the session goes on where that one broke off, provided that the executor
        is the same process; compare `scheduler_epoch` and the capabilities' `executor_epoch`
        to learn whether it does. Raises ExecutorUnavailableError.

        A scheduler that has just started takes over from any other, also where the clock was set
        back meanwhile: it goes above the epoch that the executor knows. One that has had a session
        does so only once the other is gone, so that two of them never take the executor from each
        other for ever.
        """
        try:
            try:
                session = await self._open_channel(resume)
            except StaleEpochError as error:
                if (self._has_had_session and error.is_taken) or not error.last_epoch:
                    raise
                # Far enough that the other one does not come to the same when it counts on.
                self._last_epoch = error.last_epoch + _LEAST_GAP + secrets.randbits(_GAP_BITS)
                session = await self._open_channel(None)
        except (
            grpc.aio.AioRpcError,
            SessionLostError,
            SessionRefusedError,
            WireError,
        ) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            raise ExecutorUnavailableError(
                f"[executor] no session with {self._address}: {reason}"
            ) from error
        self._has_had_session = True
        return session

    async def _open_channel(self, resume: ExecutorSession | None) -> ExecutorSession:
        channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        try:
            return await self._open(channel, resume)
        except BaseException:
            await channel.close(None)
            raise

    async def _open(
        self, channel: grpc.aio.Channel, resume: ExecutorSession | None
    ) -> ExecutorSession:
        stub = pb_grpc.ExecutorServiceStub(channel)
        description = await self._describe(stub)
        executor_epoch = description.capabilities.executor_epoch
        if resume is not None and resume.description.capabilities.executor_epoch == executor_epoch:
            scheduler_epoch = resume.scheduler_epoch
        else:
            self._last_epoch += 1
            scheduler_epoch = self._last_epoch
        call = stub.Session(None)
        session = ExecutorSession(
            channel, call, description,
            scheduler_epoch=scheduler_epoch, answer_seconds=self._answer_seconds,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_SECONDS):
                await session.write(wire.start_session(scheduler_epoch))
                response = await session.read()
            started_epoch = wire.read_started(response)
            if started_epoch != executor_epoch:
                raise SessionLostError("[session] the executor restarted while it was described")
        except BaseException as error:
            await session.close()
            if isinstance(error, TimeoutError):
                raise SessionLostError(f"[session] no session started: {error}") from error
            raise
        return session

    async def _describe(self, stub: "ExecutorServiceAsyncStub") -> ExecutorDescription:
        reply = await stub.GetCapabilities(
            pb.GetCapabilitiesRequest(), timeout=_CALL_TIMEOUT_SECONDS
        )
        capabilities = read_capabilities(reply)
        if capabilities is None:
            raise ExecutorLoadingError("[executor] the executor is still loading")
        if self._known is None or self._known.capabilities != capabilities:
            tokenizer = await stub.GetTokenizer(
                pb.GetTokenizerRequest(model_id=capabilities.model.model_id),
                timeout=_CALL_TIMEOUT_SECONDS,
            )
            self._known = ExecutorDescription(capabilities, read_tokenizer(tokenizer))
        return self._known
