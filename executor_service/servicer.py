"""The executor's RPCs: messages to engine calls and back. No policy, no state of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from executor_service import wire, wire_capabilities, wire_provenance
from executor_service.errors import (
    ExecutorError,
    InvalidRequestError,
    ModelNotFoundError,
    SessionFencedError,
    StaleEpochError,
)
from executor_service.servicer_stream import SessionStream
from executor_service.statuses import abort
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch.executor.v1 import provenance_pb2 as provenance_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from executor_service.host import Host
    from executor_service.session_gate import LiveStream

    Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]


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
            await SessionStream(self._host, context, stream, ticket).run()
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
        try:
            ticket, counts = await self._host.run(
                lambda: (session.start(start.scheduler_epoch), session.occupancy())
            )
        except StaleEpochError as error:
            # Whoever was replaced may come back once nobody else is there.
            error.metadata["has_session"] = "true" if self._host.gate.is_taken else "false"
            raise
        self._host.metrics.observe_occupancy(counts)
        started = pb.SessionStarted(
            executor_epoch=self._host.executor_epoch, kv_occupancy=wire.occupancy(counts)
        )
        return ticket, pb.SessionResponse(started=started)
