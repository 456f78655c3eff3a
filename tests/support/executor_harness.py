"""A real executor server in the test's process: real socket, real gRPC, toy or real kernels."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.models.registry import ModelLocation
from executor_service.server import Server
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch.executor.v1 import token_rows_pb2 as rows_pb
from isobatch_kernels.program import Program
from tests.support.fake_backend import FakeBackend

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(slots=True)
class Harness:
    """A running server and what its backend factory made."""

    server: Server
    address: str
    socket: Path
    backends: list[FakeBackend] = field(default_factory=list)

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own."""
        return grpc.aio.insecure_channel(self.address, options=OPTIONS)


@contextlib.asynccontextmanager
async def running(
    model: Path, *, gate: asyncio.Event | None = None, **settings: Any
) -> AsyncIterator[Harness]:
    """Serve `model` with a toy backend; with a gate, loading waits until it is set."""
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    loop = asyncio.get_running_loop()
    socket = folder / "e.sock"
    config = ExecutorConfig(
        listen=f"unix:{socket}", metrics_port=0, **{"kv_memory_mb": 1, "profile": "off", **settings}
    )
    backends: list[FakeBackend] = []

    def create_backend(program: Program, *, num_blocks: int, **_: Any) -> FakeBackend:
        if gate is not None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        backend = FakeBackend(num_blocks, vocab_size=program.dimensions.vocab_size)
        backends.append(backend)
        return backend

    server = Server(
        config, ModelLocation(model, "tiny"), create_backend, lambda _: SelfTestResult(3, ())
    )
    task = asyncio.ensure_future(server.run())
    try:
        harness = Harness(server, config.listen, socket, backends)
        async with asyncio.timeout(20):
            while not socket.exists():
                if task.done():
                    raise AssertionError(f"the server ended with {task.result()}")
                await asyncio.sleep(0.005)
            if gate is None:
                await ready(harness)
        yield harness
    finally:
        for _ in range(2):
            server.request_stop()
        try:
            assert await asyncio.wait_for(task, 60) == 0
        finally:
            shutil.rmtree(folder)


async def ready(harness: Harness) -> pb.GetCapabilitiesResponse:
    """Wait until the executor is ready and return its capabilities."""
    async with harness.channel() as channel:
        stub = pb_grpc.ExecutorServiceStub(channel)
        while True:
            reply = await stub.GetCapabilities(pb.GetCapabilitiesRequest(), wait_for_ready=True)
            if reply.ready:
                return reply
            await asyncio.sleep(0.005)


class SessionClient:
    """One session's stream, written and read message by message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = pb_grpc.ExecutorServiceStub(channel).Session()

    async def send(self, **message: Any) -> None:
        """Write one message."""
        await self.call.write(pb.SessionRequest(**message))

    async def read(self) -> pb.SessionResponse:
        """Read one answer; raises AioRpcError where the stream ended."""
        answer = await self.call.read()
        if isinstance(answer, pb.SessionResponse):
            return answer
        raise grpc.aio.AioRpcError(
            await self.call.code(),
            await self.call.initial_metadata(),
            await self.call.trailing_metadata(),
            await self.call.details(),
        )

    async def ask(self, **message: Any) -> pb.SessionResponse:
        """Write one message and read its answer."""
        await self.send(**message)
        return await self.read()

    async def start(self, epoch: int) -> pb.SessionStarted:
        """Begin the session."""
        return (await self.ask(start=pb.StartSession(scheduler_epoch=epoch))).started

    async def open(self, *sequence_ids: int, generation: int = 0) -> rows_pb.SequencesOpened:
        """Open sequences."""
        sequences = [
            rows_pb.OpenSequence(key=rows_pb.SequenceKey(sequence_id=each, generation=generation))
            for each in sequence_ids
        ]
        return (await self.ask(open=rows_pb.OpenSequences(sequences=sequences))).opened

    async def step(self, step: rows_pb.Step) -> rows_pb.StepResult:
        """Compute a step."""
        return (await self.ask(step=step)).step_result


def step_message(
    step_id: int,
    rows: Sequence[tuple[int, Sequence[int], int]],
    statistics: int = rows_pb.STATISTIC_ARGMAX,
    **changes: Any,
) -> rows_pb.Step:
    """A step of rows (sequence id, tokens, start) that asks for each row's last token."""

    def pack(dtype: str, values: Sequence[float]) -> bytes:
        return np.array(values, dtype).tobytes()

    count = len(rows)
    fields: dict[str, Any] = {
        "step_id": step_id,
        "row_sequence_ids": pack("<u8", [row[0] for row in rows]),
        "row_generations": pack("<u4", [0] * count),
        "row_start_positions": pack("<i4", [row[2] for row in rows]),
        "row_num_tokens": pack("<i4", [len(row[1]) for row in rows]),
        "token_ids": pack("<i4", [token for row in rows for token in row[1]]),
        "wanted_token_indexes": pack("<i4", list(np.cumsum([len(row[1]) for row in rows]) - 1)),
        "wanted_statistics": pack("<u4", [statistics] * count),
        "wanted_top_k": pack("<i4", [0] * count),
        "wanted_inverse_temperatures": pack("<f4", [1] * count),
        "wanted_quantiles": pack("<f4", [0] * count),
    }
    return rows_pb.Step(**(fields | changes))


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a status."""
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)
