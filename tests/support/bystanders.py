"""Healthy streams beside a test's trouble, and the check that nothing is left behind.

A bystander asks for the same text again and again and compares every answer with the one that it
got alone; so it is in the middle of a stream whatever the test does, and however long.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from isobatch.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

NUM_BYSTANDERS = 8
# Only a failing test waits so long; a loaded machine takes its time.
WAIT_SECONDS = 60.0
# gRPC's thread pool breathes; what leaks a thread for each request passes this at once.
SPARE_THREADS = 6

Answer = tuple[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call failed."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    fields: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    retry_seconds: float | None = None


def stub_of(channel: grpc.aio.Channel) -> SchedulerServiceAsyncStub:
    """The scheduler's methods over a channel."""
    return pb_grpc.SchedulerServiceStub(channel)


@contextlib.asynccontextmanager
async def connected(address: str, *options: tuple[str, Any]) -> AsyncIterator[Any]:
    """A stub over a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1), *options]
    async with grpc.aio.insecure_channel(address, options=own) as channel:
        yield stub_of(channel)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """A failed call's status, taken apart."""
    status: Any = None
    # The client's own words at a deadline may come with the server's details.
    with contextlib.suppress(ValueError):
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        for each in (info, request, retry):
            detail.Unpack(each)
    delay = retry.retry_delay
    return Refusal(
        error.code(),
        error.details() or "",
        info.reason,
        tuple(each.field for each in request.field_violations),
        dict(info.metadata),
        delay.seconds + delay.nanos / 1e9 if retry.ByteSize() else None,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """A whole stream."""

    accepted: pb.Accepted
    token_ids: tuple[int, ...]
    text: str
    finished: pb.Finished

    @property
    def answer(self) -> Answer:
        """What must not depend on anything around the request."""
        return self.token_ids, self.text


async def run(stub: Any, on_token: Callable[[], None] | None = None, **request: Any) -> Output:
    """Run a request to its end and check its stream's shape; `on_token` is called with each."""
    accepted, ids, text = pb.Accepted(), list[int](), ""
    async for event in stub.Generate(pb.GenerateRequest(**request), timeout=60.0):
        match event.WhichOneof("event"):
            case "accepted":
                accepted = event.accepted
            case "delta":
                assert event.delta.start_index == len(ids)
                ids += event.delta.token_ids
                text += event.delta.text
                if on_token is not None:
                    on_token()
            case "finished":
                assert event.finished.usage.num_generated_tokens == len(ids)
                return Output(accepted, tuple(ids), text + event.finished.text, event.finished)
    raise AssertionError("a stream must end with Finished")


async def refused(call: Any) -> Refusal:
    """Wait for a call that must fail."""
    try:
        if hasattr(call, "__aiter__"):
            got = [event async for event in call]
        else:
            got = await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError(f"the call must fail, got {got!r:.300}")


def bystander_requests(num_tokens: int, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Eight different requests over token ids: greedy, drawn, and cut by top-k, top-p and min-p."""
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.9, "min_p": 0.05}, {},
        {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.8, "logit_bias": {5: 2.0}},
    ]  # fmt: skip
    return [
        {
            "token_ids": pb.TokenIds(ids=prompts[index % len(prompts)]),
            "sampling": sampling_pb2.SamplingParams(seed=index, **way),
            "stopping": sampling_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        }
        for index, way in enumerate(ways)
    ]


async def solo_answers(address: str, requests: Sequence[dict[str, Any]]) -> list[Answer]:
    """The answer of each request while it is alone."""
    async with connected(address) as stub:
        return [(await run(stub, **request)).answer for request in requests]


@contextlib.asynccontextmanager
async def bystanders(
    address: str, requests: Sequence[dict[str, Any]], solo: Sequence[Answer]
) -> AsyncIterator[None]:
    """Keep a healthy stream of each request going; every answer must equal its solo run's."""
    is_over = asyncio.Event()
    started = [asyncio.Event() for _ in requests]

    async def keep_asking(index: int) -> None:
        async with connected(address) as stub:
            while not is_over.is_set():
                output = await run(stub, started[index].set, **requests[index])
                assert output.answer == solo[index], f"bystander {index} was harmed"

    tasks = [asyncio.create_task(keep_asking(index)) for index in range(len(requests))]
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            for each in started:
                await each.wait()
        yield
        is_over.set()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return when the condition holds; fail, naming it, when it takes too long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not await holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Descriptors and threads of some processes, by process id."""

    counts: dict[int, tuple[int, int]]


def footprint(*pids: int) -> Footprint:
    """Count descriptors and threads; connections of this process that are done with are closed."""
    # gRPC closes a connection of asyncio when its last call is collected, and calls are in cycles.
    gc.collect()
    processes = [psutil.Process(pid) for pid in pids]
    return Footprint({each.pid: (each.num_fds(), each.num_threads()) for each in processes})


async def assert_idle(address: str, before: Footprint | None = None) -> None:
    """Nothing runs or waits, every block is free, descriptors and threads are back."""
    async with connected(address) as stub:
        stats = pb.GetStatsResponse()

        async def is_idle() -> bool:
            nonlocal stats
            stats = await stub.GetStats(pb.GetStatsRequest())
            held = stats.total_blocks - stats.free_blocks
            return not (stats.num_running or stats.num_waiting or held)

        await until(is_idle, "an idle scheduler with all blocks free")
    if before is None:
        return
    now = before

    async def is_back() -> bool:
        nonlocal now
        now = footprint(*before.counts)
        return all(
            fds <= before.counts[pid][0] and threads <= before.counts[pid][1] + SPARE_THREADS
            for pid, (fds, threads) in now.counts.items()
        )

    try:
        await until(is_back, "descriptors and threads as before")
    except AssertionError as error:
        raise AssertionError(f"{error}: {before.counts} became {now.counts}") from None
