"""One session's stream after its start: a reader beside the writer.

The reader decodes messages and queues their work for the engine thread as they come, so that a step
waits there while the one ahead of it is computed. The writer sends the answers in the same order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from executor_service import logs, wire, wire_drafts
from executor_service.errors import InvalidRequestError
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2 as rows_pb

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from executor_service.engine.step_request import StepAnswer, StepRequest
    from executor_service.host import Host
    from executor_service.session_gate import LiveStream

    Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]

MAX_MESSAGE_BYTES: Final = 64 << 20
# Leaves room for the message around the rows.
MAX_LOGITS_BYTES: Final = MAX_MESSAGE_BYTES - 4096
MAX_UNANSWERED: Final = 4
"""Requests of a stream that are taken in before the first of them is answered."""


class SessionStream:
    """The messages of one live stream."""

    def __init__(self, host: Host, context: Context, stream: LiveStream, ticket: int) -> None:
        """Answer the requests of `context` for the session that has the ticket."""
        self._host = host
        self._context = context
        self._stream = stream
        self._ticket = ticket
        # What sends each answer, in order; the last one ends the stream.
        self._answers: deque[_Answer] = deque()
        self._has_answers = asyncio.Event()
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Return when the client has ended the stream; raises what a request fails with."""
        reading = asyncio.ensure_future(self._read())
        try:
            while True:
                while not self._answers:
                    self._has_answers.clear()
                    await self._has_answers.wait()
                answer = self._answers[0]
                if not await answer.send(self._context):
                    return
                self._answers.popleft()
                self._has_room.set()
        finally:
            reading.cancel()
            for answer in self._answers:
                answer.cancel()

    def _put(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._has_answers.set()

    async def _read(self) -> None:
        try:
            while True:
                message: object = await self._context.read()
                if not isinstance(message, pb.SessionRequest):
                    self._put(_End())
                    return
                arrived_ns = time.perf_counter_ns()
                self._stream.last_request = time.monotonic()
                self._put(self._take(message, arrived_ns))
                while len(self._answers) >= MAX_UNANSWERED:
                    self._has_room.clear()
                    await self._has_room.wait()
        except Exception as error:
            self._put(_End(error))

    def _take(self, message: pb.SessionRequest, arrived_ns: int) -> _Answer:
        session, ticket, host = self._host.engine.session, self._ticket, self._host
        kind = message.WhichOneof("message")
        if kind == "step":
            request = wire.read_step(message.step)
            return _StepAnswer(
                host,
                request,
                arrived_ns,
                host.submit_begun(lambda: session.begin_step(ticket, request, arrived_ns)),
            )
        return _OtherAnswer(host.submit(self._work(message, kind, arrived_ns)))

    def _work(
        self, message: pb.SessionRequest, kind: str | None, arrived_ns: int
    ) -> Callable[[], pb.SessionResponse]:
        """Return what the engine thread does for a message that is not a step."""
        session, ticket = self._host.engine.session, self._ticket
        match kind:
            case "open":
                openings = wire.read_openings(message.open)

                def open_sequences() -> pb.SessionResponse:
                    cached = session.open(ticket, openings)
                    opened = wire.sequences_opened(openings, cached, session.occupancy())
                    return pb.SessionResponse(opened=opened)

                return open_sequences
            case "fetch_logits":
                fetch = message.fetch_logits
                indexes = wire.read_wanted_indexes(fetch)
                return lambda: wire.logits_fetched(
                    fetch.step_id,
                    session.fetch_logits(ticket, fetch.step_id, indexes, MAX_LOGITS_BYTES),
                )
            case "release":
                sequence_ids = wire.read_released(message.release)

                def release() -> pb.SessionResponse:
                    session.release(ticket, sequence_ids)
                    counts = wire.occupancy(session.occupancy())
                    return pb.SessionResponse(
                        released=rows_pb.SequencesReleased(kv_occupancy=counts)
                    )

                return release
            case "draft":
                drafts = wire_drafts.read_draft(message.draft)

                def draft() -> pb.SessionResponse:
                    answer = session.draft(ticket, drafts, time.perf_counter_ns() - arrived_ns)
                    return wire_drafts.drafted(answer, time.perf_counter_ns() - arrived_ns)

                return draft
            case "start":
                raise InvalidRequestError("[session] start must come once, got it again")
            case _:
                raise InvalidRequestError("[session] a message must be set, got none")


class _End:
    """The end of the stream, with the error that it ends with, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def send(self, context: Context) -> bool:
        if self._error is not None:
            raise self._error
        return False

    def cancel(self) -> None:
        """Have nothing under way."""


class _OtherAnswer:
    """The answer to a message that is not a step."""

    def __init__(self, response: asyncio.Future[pb.SessionResponse]) -> None:
        self._response = response

    async def send(self, context: Context) -> bool:
        await context.write(await self._response)
        return True

    def cancel(self) -> None:
        """Leave the work out, if its turn has not come."""
        _cancel(self._response)


class _StepAnswer:
    """The answer to a step."""

    def __init__(
        self,
        host: Host,
        request: StepRequest,
        arrived_ns: int,
        answer: asyncio.Future[StepAnswer],
    ) -> None:
        self._host = host
        self._request = request
        self._arrived_ns = arrived_ns
        self._answer = answer

    async def send(self, context: Context) -> bool:
        host = self._host
        logs.bind(step_id=self._request.step_id)
        answer = await self._answer
        # A step that waited for the one ahead of it was not held up here.
        total_ns = time.perf_counter_ns() - max(self._arrived_ns, answer.since_ns)
        try:
            result = wire.step_result(answer, host.executor_epoch, total_ns)
            await context.write(pb.SessionResponse(step_result=result))
        finally:
            # After the answer, which the scheduler waits for.
            host.metrics.observe_step(self._request, answer, total_ns)
        return True

    def cancel(self) -> None:
        """Leave the step out, if its turn has not come."""
        _cancel(self._answer)


def _cancel(future: asyncio.Future[Any]) -> None:
    """Cancel; of what has failed already, nobody needs to know."""
    if not future.cancel() and not future.cancelled():
        future.exception()


_Answer = _End | _OtherAnswer | _StepAnswer
