"""A scheduler server and a fake executor in one process, over real Unix sockets."""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service.config import SchedulerConfig
from scheduler_service.server import SchedulerServer
from tests.support.fake_executor import FakeExecutor

if TYPE_CHECKING:
    from isobatch.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

WAIT_SECONDS = 60.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds; fail when it takes too long."""
    async with asyncio.timeout(WAIT_SECONDS):
        for pause in itertools.repeat(0.005):
            if await holds():
                return
            await asyncio.sleep(pause)


@dataclass(slots=True)
class Output:
    """A whole stream."""

    accepted: pb.Accepted
    token_ids: list[int]
    text: str
    digests: list[bytes]
    finished: pb.Finished
    num_deltas: int


async def collect(call: Any) -> Output:
    """Read a stream to its end and check its shape: Accepted, gapless deltas, Finished."""
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    token_ids: list[int] = []
    texts: list[str] = []
    digests: list[bytes] = []
    for event in events[1:-1]:
        assert event.delta.start_index == len(token_ids)
        token_ids += event.delta.token_ids
        texts.append(event.delta.text)
        digests += event.delta.logits_digests
    finished = events[-1].finished
    assert finished.usage.num_generated_tokens == len(token_ids)
    return Output(
        events[0].accepted, token_ids, "".join(texts) + finished.text, digests, finished,
        len(events) - 2,
    )  # fmt: skip


@dataclass(slots=True)
class Harness:
    """What a test talks to."""

    server: SchedulerServer
    executor: FakeExecutor
    stub: "SchedulerServiceAsyncStub"
    channel: grpc.aio.Channel
    executor_address: str
    socket: Path

    def generate(self, timeout: float | None = None, **fields: Any) -> Any:
        """Start a Generate call."""
        return self.stub.Generate(pb.GenerateRequest(**fields), timeout=timeout)

    async def complete(self, **fields: Any) -> Output:
        """Run a Generate call to its end."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await collect(self.generate(**fields))

    async def health(self) -> int:
        """Return the health status."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        reply: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest())
        return reply.status

    async def wait_serving(self, expected: bool = True) -> None:
        """Return when the scheduler has a session, or has none."""

        async def holds() -> bool:
            return (await self.health() == _SERVING) is expected

        await until(holds)

    async def wait_idle(self) -> None:
        """Return when no request is live and the executor holds no blocks."""

        async def holds() -> bool:
            served = self.server.engine.served
            live = served is None or served.loop.state.requests
            return not live and self.executor.num_used_blocks == 0

        await until(holds)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a sample of this scheduler."""
        labels = {"model": self.executor.model_id, **labels}
        value = self.server.registry.get_sample_value(f"isobatch_scheduler_{name}", labels)
        assert value is not None, name
        return value


@contextlib.contextmanager
def socket_folder() -> Any:
    """A private folder with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(
    fake: FakeExecutor | None = None, *, start_executor: bool = True, **settings: Any
) -> AsyncIterator[Harness]:
    """Run a scheduler over a fake executor; `settings` are fields of SchedulerConfig."""
    fake = fake or FakeExecutor()
    with socket_folder() as folder:
        executor_address = f"unix:{folder}/x.sock"
        config = SchedulerConfig(
            **{
                "listen": f"unix:{folder}/s.sock",
                "executor": executor_address,
                "metrics_port": 0,
                "drain_seconds": 5.0,
                **settings,
            }
        )
        server = SchedulerServer(config)
        async with contextlib.AsyncExitStack() as stack:
            if start_executor:
                await stack.enter_async_context(fake.serving(executor_address))
            await stack.enter_async_context(server.running())
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(config.listen, options=options)
            )
            harness = Harness(
                server, fake, pb_grpc.SchedulerServiceStub(channel), channel,
                executor_address, folder / "s.sock",
            )  # fmt: skip
            if start_executor:
                await harness.wait_serving()
            yield harness
