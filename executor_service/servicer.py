"""The executor's RPCs: messages to engine calls and back. No policy, no state of its own."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import grpc

from executor_service import logs, wire, wire_capabilities, wire_drafts, wire_provenance
from executor_service.errors import (
    ExecutorError,
    InvalidRequestError,
    ModelNotFoundError,
    SessionFencedError,
)
from executor_service.statuses import abort
from isobatch.executor.v1 import drafts_pb2 as drafts_pb
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch.executor.v1 import provenance_pb2 as provenance_pb
from isobatch.executor.v1 import token_rows_pb2 as rows_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from executor_service.host import Host
    from executor_service.session_gate import LiveStream

    Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]

MAX_MESSAGE_BYTES: Final = 64 << 20
# Leaves room for the message around the rows.
MAX_LOGITS_BYTES: Final = MAX_MESSAGE_BYTES - 4096


class ExecutorServicer(pb_grpc.ExecutorServiceServicer):
    """Serves one host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: grpc.aio.ServicerContext[pb.GetCapabilitiesRequest, pb.GetCapabilitiesResponse],
    ) -> pb.GetCapabilitiesResponse:
        """Describe the executor; while it loads, without a model."""
        host = self._host
        capabilities = host.engine.capabilities if host.is_ready else None
        return wire_capabilities.capabilities(host.executor_epoch, host.config, capabilities)

    async def GetTokenizer(
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse],
    ) -> pb.GetTokenizerResponse:
        """Return the tokenizer of a model."""
        try:
            capabilities = self._host.engine.capabilities
            if request.model_id not in ("", capabilities.model.model_id):
                raise ModelNotFoundError(
                    f"[tokenizer] model_id must be {capabilities.model.model_id}, "
                    f"got {request.model_id}",
                    {"model_id": request.model_id},
                )
        except ExecutorError as error:
            await abort(context, error)
        return wire_capabilities.tokenizer(capabilities)

    async def GetProvenance(
        self,
        request: provenance_pb.GetProvenanceRequest,
        context: grpc.aio.ServicerContext[
            provenance_pb.GetProvenanceRequest, provenance_pb.GetProvenanceResponse
        ],
    ) -> provenance_pb.GetProvenanceResponse:
        """Say who wrote cached keys and values."""
        host = self._host
        try:
            engine = host.engine
            ask = wire_provenance.read_request(request)
            report = await host.run(lambda: ask(engine.session))
        except ExecutorError as error:
            await abort(context, error)
        numeric_class = engine.capabilities.model.numeric_class
        return wire_provenance.response(host.executor_epoch, numeric_class, report)

    # A coroutine that reads and writes by itself, not a generator as the stub has it: a stream that
    # is fenced while its answer is written must still end with a status of ours.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """Run one session's stream until it ends or another one takes over."""
        stream: LiveStream | None = None
        try:
            first: object = await context.read()
            if not isinstance(first, pb.SessionRequest):
                return
            if first.WhichOneof("message") != "start":
                raise InvalidRequestError(
                    f"[session] the first message must be start, got {first.WhichOneof('message')}"
                )
            self._host.refuse_when_draining()
            ticket, response = await self._start(first.start)
            # Only a session that the engine has accepted ends the one before it.
            stream = self._host.gate.enter(
                SessionFencedError("[session] another session has taken over, got the old one")
            )
            await context.write(response)
            while True:
                message: object = await context.read()
                if not isinstance(message, pb.SessionRequest):
                    return
                arrived_ns = time.perf_counter_ns()
                stream.last_request = time.monotonic()
                if message.WhichOneof("message") == "step":
                    await self._step(ticket, message.step, arrived_ns, context)
                else:
                    await context.write(await self._answer(ticket, message))
        except asyncio.CancelledError:
            if stream is None or stream.ended_by is None:
                raise
            stream.task.uncancel()
            await abort(context, stream.ended_by)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error)
        finally:
            if stream is not None:
                self._host.gate.leave(stream)

    async def _start(self, start: pb.StartSession) -> tuple[int, pb.SessionResponse]:
        session = self._host.engine.session
        ticket, counts = await self._host.run(
            lambda: (session.start(start.scheduler_epoch), session.occupancy())
        )
        self._host.metrics.observe_occupancy(counts)
        started = pb.SessionStarted(
            executor_epoch=self._host.executor_epoch, kv_occupancy=wire.occupancy(counts)
        )
        return ticket, pb.SessionResponse(started=started)

    async def _answer(self, ticket: int, message: pb.SessionRequest) -> pb.SessionResponse:
        match message.WhichOneof("message"):
            case "open":
                return await self._open(ticket, message.open)
            case "fetch_logits":
                return await self._fetch_logits(ticket, message.fetch_logits)
            case "release":
                return await self._release(ticket, message.release)
            case "draft":
                return await self._draft(ticket, message.draft)
            case "start":
                raise InvalidRequestError("[session] start must come once, got it again")
            case _:
                raise InvalidRequestError("[session] a message must be set, got none")

    async def _step(
        self, ticket: int, step: rows_pb.Step, arrived_ns: int, context: Context
    ) -> None:
        host = self._host
        session = host.engine.session
        logs.bind(step_id=step.step_id)
        request = wire.read_step(step)
        answer = await host.run(
            lambda: session.step(ticket, request, time.perf_counter_ns() - arrived_ns)
        )
        total_ns = time.perf_counter_ns() - arrived_ns
        try:
            result = wire.step_result(answer, host.executor_epoch, total_ns)
            await context.write(pb.SessionResponse(step_result=result))
        finally:
            # After the answer, which the scheduler waits for.
            host.metrics.observe_step(request, answer, total_ns)

    async def _open(self, ticket: int, message: rows_pb.OpenSequences) -> pb.SessionResponse:
        session = self._host.engine.session
        openings = wire.read_openings(message)
        cached, counts = await self._host.run(
            lambda: (session.open(ticket, openings), session.occupancy())
        )
        return pb.SessionResponse(opened=wire.sequences_opened(openings, cached, counts))

    async def _fetch_logits(self, ticket: int, message: rows_pb.FetchLogits) -> pb.SessionResponse:
        session = self._host.engine.session
        indexes = wire.read_wanted_indexes(message)
        logits = await self._host.run(
            lambda: session.fetch_logits(ticket, message.step_id, indexes, MAX_LOGITS_BYTES)
        )
        return wire.logits_fetched(message.step_id, logits)

    async def _draft(self, ticket: int, message: drafts_pb.DraftTokens) -> pb.SessionResponse:
        arrived_ns = time.perf_counter_ns()
        session = self._host.engine.session
        request = wire_drafts.read_draft(message)
        answer = await self._host.run(
            lambda: session.draft(ticket, request, time.perf_counter_ns() - arrived_ns)
        )
        return wire_drafts.drafted(answer, time.perf_counter_ns() - arrived_ns)

    async def _release(self, ticket: int, message: rows_pb.ReleaseSequences) -> pb.SessionResponse:
        session = self._host.engine.session
        sequence_ids = wire.read_released(message)

        def release() -> rows_pb.KvOccupancy:
            session.release(ticket, sequence_ids)
            return wire.occupancy(session.occupancy())

        released = rows_pb.SequencesReleased(kv_occupancy=await self._host.run(release))
        return pb.SessionResponse(released=released)
