"""Processes that die, freeze, come late, or find their address taken. Streams go on unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.bystanders import (
    Answer,
    Output,
    assert_idle,
    bystander_requests,
    connected,
    footprint,
    refused,
    run,
    solo_answers,
    until,
)
from tests.support.services import ServicePair, running_pair, start_executor
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

CODE = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
SHAPE = TinyShape(vocab_size=vocab_size(), context_length=4096)
FLAGS = ("--kv-memory-mb", "1", "--threads", "1")
STEP_TIMEOUT = 2.0
# Long enough to be in mid-stream when the trouble comes.
REQUESTS = bystander_requests(120, [[50, 206, 282], [28, 39, 16], list(range(100, 140))])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(path, SHAPE, Storage(4))
    return path


@dataclass(slots=True)
class Mortal:
    """A pair whose processes a test may replace, and what each request gives alone."""

    model: Path
    pair: ServicePair
    solo: list[Answer]

    @property
    def address(self) -> str:
        return self.pair.schedulers[-1].address

    def start_scheduler(self, *flags: str) -> None:
        """Start another scheduler, which takes the executor over from the last one."""
        self.pair.start_scheduler("--step-timeout", str(STEP_TIMEOUT), *flags)

    def restart_executor(self) -> None:
        self.pair.executor = start_executor(self.pair.folder, self.model, *FLAGS)

    async def is_serving(self) -> bool:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            return bool(reply.status == SERVING)


@pytest.fixture(scope="module")
def mortal(model: Path) -> Iterator[Mortal]:
    flags = ("--step-timeout", str(STEP_TIMEOUT))
    with running_pair(model, executor_flags=FLAGS, scheduler_flags=flags) as pair:
        solo = asyncio.run(solo_answers(pair.schedulers[0].address, REQUESTS))
        yield Mortal(model, pair, solo)


@contextlib.asynccontextmanager
async def _streams_under_way(mortal: Mortal, stub: Any) -> Any:
    """All requests at once, each past its first token; equal to their solo runs at the end."""
    begun = [asyncio.Event() for _ in REQUESTS]
    tasks = [
        asyncio.create_task(run(stub, event.set, **request))
        for event, request in zip(begun, REQUESTS, strict=True)
    ]
    try:
        async with asyncio.timeout(60):
            for event in begun:
                await event.wait()
        assert not any(task.done() for task in tasks)
        yield
        outputs = await asyncio.gather(*tasks)
        assert [output.answer for output in outputs] == mortal.solo
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_b43_a_frozen_executor_is_reported_and_thaws_without_loss(mortal: Mortal) -> None:
    pid = mortal.pair.executor.process.pid
    async with connected(mortal.address) as stub:
        await run(stub, **REQUESTS[0])
        async with _streams_under_way(mortal, stub):
            os.kill(pid, signal.SIGSTOP)
            try:

                async def is_reported() -> bool:
                    return not await mortal.is_serving()

                async with asyncio.timeout(STEP_TIMEOUT + 20):
                    await until(is_reported, "NOT_SERVING")
                queued = stub.Generate(pb.GenerateRequest(text="x"), timeout=0.3)
                found = await refused(queued)
                is_late = found.code is CODE.DEADLINE_EXCEEDED
                assert is_late or found.reason == "DEADLINE_UNREACHABLE"
                stats = await stub.GetStats(pb.GetStatsRequest())
                assert not stats.executor_connected
                assert stats.num_running + stats.num_waiting == len(REQUESTS)
            finally:
                os.kill(pid, signal.SIGCONT)
        assert (await stub.GetStats(pb.GetStatsRequest())).num_preemptions == 0
        await until(mortal.is_serving, "SERVING")
    await assert_idle(mortal.address)
    assert mortal.pair.executor.process.poll() is None


async def test_b13_prompts_around_the_chunk_size(mortal: Mortal) -> None:
    """Every length gives what it gives in one piece: nothing is sampled before the last chunk."""

    async def outputs(salt: str) -> list[Output]:
        """With the salt nothing is cached of what the other salt has computed."""
        async with connected(mortal.address) as stub:
            return [
                await run(
                    stub,
                    cache_salt=salt,
                    token_ids=pb.TokenIds(ids=range(3, 3 + length)),
                    sampling=sampling_pb2.SamplingParams(temperature=0.9, seed=1),
                    stopping=sampling_pb2.StoppingParams(max_tokens=12, ignore_eos=True),
                )
                for length in (15, 16, 17, 31, 32, 33)
            ]

    whole = await outputs("whole")
    await asyncio.to_thread(mortal.start_scheduler, "--max-prefill-chunk", "16")
    cut = await outputs("cut")
    assert [each.answer for each in cut] == [each.answer for each in whole]
    assert [each.finished.usage for each in cut] == [each.finished.usage for each in whole]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_b40_streams_go_on_at_the_next_executor(
    mortal: Mortal, number: signal.Signals
) -> None:
    """Killed, it is missed at once; asked to stop, it lets a live session finish first."""
    async with connected(mortal.address) as stub:
        await run(stub, **REQUESTS[0])
        before = await stub.GetStats(pb.GetStatsRequest())
        async with _streams_under_way(mortal, stub):
            await asyncio.to_thread(mortal.pair.executor.stop, number)
            await asyncio.to_thread(mortal.restart_executor)
        after = await stub.GetStats(pb.GetStatsRequest())
    if number is signal.SIGKILL:
        assert after.num_executor_reconnects == before.num_executor_reconnects + 1
        assert after.num_preemptions == before.num_preemptions + len(REQUESTS)
    await until(mortal.is_serving, "SERVING")
    await assert_idle(mortal.address)


async def test_b37_streams_of_a_killed_client_are_given_up(mortal: Mortal) -> None:
    pids = [mortal.pair.executor.process.pid, mortal.pair.schedulers[-1].process.pid]
    before = footprint(*pids)
    code = """
import sys
from scheduler_service.client import Client, GenerationParams
client = Client(sys.argv[1])
params = GenerationParams(max_tokens=2000, ignore_eos=True)
streams = [client.generate([5, 6, 7], params) for _ in range(16)]
for _ in range(5):
    for stream in streams:
        next(stream)
print("under way", flush=True)
sys.stdin.read()
"""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, mortal.address,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    assert await asyncio.wait_for(client.stdout.readline(), 60) == b"under way\n"
    client.kill()
    await client.wait()
    await assert_idle(mortal.address, before)


async def test_b37_cancels_and_closed_connections_leak_nothing(mortal: Mortal) -> None:
    pids = [mortal.pair.executor.process.pid, mortal.pair.schedulers[-1].process.pid]
    stopping = sampling_pb2.StoppingParams(max_tokens=2000, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), stopping=stopping)

    async def leave(stub: Any, num_messages: int) -> None:
        call = stub.Generate(request)
        for _ in range(num_messages):
            await call.read()
        call.cancel()

    async def cycle() -> None:
        async with connected(mortal.address) as stub:
            await asyncio.gather(*(leave(stub, index % 6) for index in range(16)))
            # The connection is closed under these.
            for _ in range(4):
                await stub.Generate(request).read()

    await cycle()
    await assert_idle(mortal.address)
    before = footprint(*pids)
    for _ in range(5):
        await cycle()
    await assert_idle(mortal.address, before)


async def _rest(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_scheduler_that_is_killed_leaves_no_blocks_behind(mortal: Mortal) -> None:
    async with connected(mortal.address) as stub:
        calls = [stub.Generate(pb.GenerateRequest(**request)) for request in REQUESTS]
        for call in calls:
            for _ in range(2):
                await call.read()
        mortal.pair.schedulers[-1].stop(signal.SIGKILL)
        for call in calls:
            assert (await refused(_rest(call))).code is CODE.UNAVAILABLE
    assert mortal.pair.executor.process.poll() is None
    mortal.start_scheduler()
    await assert_idle(mortal.address)
    async with connected(mortal.address) as stub:
        assert (await run(stub, **REQUESTS[1])).answer == mortal.solo[1]


async def test_a_scheduler_without_an_executor_says_so_and_waits(model: Path, folder: Path) -> None:
    address = f"unix:{folder}/s.sock"
    scheduler = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_service", "--listen", address,
        "--executor", f"unix:{folder}/x.sock", "--metrics-port", "0",
        cwd=folder, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    executor = None
    try:
        async with connected(address) as stub:
            listing = await stub.ListModels(
                pb.ListModelsRequest(), wait_for_ready=True, timeout=60.0
            )
            assert not listing.models
            for call in (
                stub.Generate(pb.GenerateRequest(text="x")),
                stub.Tokenize(pb.TokenizeRequest(text="x")),
            ):
                found = await refused(call)
                assert (found.code, found.reason) == (CODE.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
                assert found.retry_seconds == 0.5
            executor = await asyncio.to_thread(start_executor, folder, model, *FLAGS)

            async def is_ready() -> bool:
                return bool((await stub.GetStats(pb.GetStatsRequest())).executor_connected)

            await until(is_ready, "a session")
            await run(stub, text="x", stopping=sampling_pb2.StoppingParams(max_tokens=2))
        await assert_idle(address)
    finally:
        scheduler.terminate()
        assert await asyncio.wait_for(scheduler.wait(), 60) == 0
        if executor is not None:
            executor.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ib-"))
    yield path
    shutil.rmtree(path)


def _refused_start(module: str, *flags: str, folder: Path) -> str:
    """Run a service that must end with 78 at once; return what it said."""
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 78, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("module", ["scheduler_service", "executor_service"])
def test_a_socket_path_over_100_bytes_is_refused(module: str, folder: Path, model: Path) -> None:
    path = folder / ("s" * 100)
    flags = ["--listen", f"unix:{path}", "--metrics-port", "0"]
    if module == "executor_service":
        flags += ["--model", str(model)]
    said = _refused_start(module, *flags, folder=folder)
    assert str(len(str(path))) in said
    assert "bytes" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_b50_a_port_in_use_is_named(folder: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((host.strip("[]"), 0))
        except OSError as error:
            pytest.skip(f"no such address on this machine: {error}")
        taken.listen()
        address = f"{host}:{taken.getsockname()[1]}"
        said = _refused_start(
            "scheduler_service", "--listen", address, "--metrics-port", "0",
            "--executor", f"unix:{folder}/x.sock", folder=folder,
        )  # fmt: skip
    assert f"the address must be free, got {address}" in said


def test_b50_a_metrics_port_in_use_is_named_and_no_socket_stays(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = _refused_start(
            "scheduler_service", "--listen", f"unix:{folder}/s.sock", "--metrics-port", port,
            "--executor", f"unix:{folder}/x.sock", folder=folder,
        )  # fmt: skip
    assert f"the metrics port must be free, got {port}" in said
    assert not (folder / "s.sock").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "live socket"])
def test_b50_a_path_in_use_is_left_alone(folder: Path, kind: str) -> None:
    path = folder / "s.sock"
    with contextlib.ExitStack() as stack:
        if kind == "file":
            path.write_text("precious")
        elif kind == "folder":
            path.mkdir()
        else:
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(str(path))
            other.listen()
        said = _refused_start(
            "scheduler_service", "--listen", f"unix:{path}", "--metrics-port", "0",
            "--executor", f"unix:{folder}/x.sock", folder=folder,
        )  # fmt: skip
        assert str(path) in said
        assert path.exists()
        if kind == "file":
            assert path.read_text() == "precious"
