"""The scheduler as a process: exit status, signals, metrics over HTTP."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service import server
from scheduler_service.client._errors import error_from_rpc
from scheduler_service.config import SchedulerConfig
from scheduler_service.errors import ConfigurationError
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import socket_folder, until


def _start(*flags: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "scheduler_service", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
    )


def test_a_configuration_error_exits_with_78() -> None:
    with socket_folder() as folder:
        process = _start("--listen", "0.0.0.0:1", folder=folder)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 78
        assert "must be a loopback address" in errors
        assert "Traceback" not in errors


def test_it_serves_metrics_and_ends_on_sigterm() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with socket_folder() as folder:
        process = _start("--metrics-port", str(port), "--log-format", "json", folder=folder)
        try:
            deadline = time.monotonic() + 60
            path = folder / "isobatch" / "scheduler.sock"
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=60) as reply:
                text = reply.read().decode()
            assert "process_cpu_seconds_total" in text
            assert "# TYPE isobatch_scheduler_requests_running gauge" in text
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        assert '"event": "draining"' in errors
        assert not path.exists()


@pytest.mark.parametrize("is_tcp", [False, True])
async def test_a_second_scheduler_hears_of_the_first(is_tcp: bool) -> None:
    """Not of the metrics port, which the first one has as well."""
    with (
        socket_folder() as folder,
        socket.create_server(("127.0.0.1", 0)) as page,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        unix.bind(f"{folder}/s.sock")
        unix.listen()
        address = f"127.0.0.1:{tcp.getsockname()[1]}" if is_tcp else f"unix:{folder}/s.sock"
        config = SchedulerConfig(
            listen=address,
            executor=f"unix:{folder}/x.sock",
            metrics_port=page.getsockname()[1],
        )
        with pytest.raises(ConfigurationError) as caught:
            await server.serve(config)
        assert f"got {address}: another process serves on it" in str(caught.value)


async def test_a_second_signal_cuts_the_drain_short(caplog: pytest.LogCaptureFixture) -> None:
    """The answer hears why, and so does the log; nobody waits out the time to drain."""
    executor = FakeExecutor(step_seconds=0.01)
    with socket_folder() as folder:
        config = SchedulerConfig(
            listen=f"unix:{folder}/s.sock", executor=f"unix:{folder}/x.sock", metrics_port=0,
            drain_seconds=600.0,
        )  # fmt: skip
        async with (
            asyncio.timeout(60),
            executor.serving(config.executor),
            grpc.aio.insecure_channel(config.listen) as channel,
        ):
            serving = asyncio.create_task(server.serve(config))
            health = health_pb2_grpc.HealthStub(channel)

            async def serves() -> bool:
                question = health_pb2.HealthCheckRequest()
                reply = await health.Check(question, wait_for_ready=True)
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

            async def drains() -> bool:
                return not await serves()

            await until(serves)
            stopping = sampling_pb2.StoppingParams(max_tokens=100_000, ignore_eos=True)
            stub = pb_grpc.SchedulerServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="x", stopping=stopping))
            events = aiter(call)
            await anext(events)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(drains)
            assert (await anext(events)).HasField("delta")
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in events:
                    pass
            await serving
    error = error_from_rpc(caught.value)
    assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
    words = "[scheduler] the service is shutting down at once: it was told to stop again"
    assert error.message == words
    assert "drain_cut_short" in caplog.text


async def test_what_is_loaded_is_frozen_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = asyncio.Event()
    monkeypatch.setattr(gc, "freeze", frozen.set)
    with socket_folder() as folder:
        config = SchedulerConfig(
            listen=f"unix:{folder}/s.sock", executor=f"unix:{folder}/x.sock", metrics_port=0
        )
        serving = asyncio.create_task(server.serve(config))
        async with asyncio.timeout(60):
            await frozen.wait()
            # Its own handler has been there since before it served.
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
