"""Starts real executor and scheduler processes for end-to-end tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_SECONDS = 150.0


def wait_serving(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the service behind `address` reports SERVING; raises with its log otherwise."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                tail = log.read_text()[-4000:]
                raise RuntimeError(f"[services] process ended with {process.returncode}:\n{tail}")
            with contextlib.suppress(grpc.RpcError):
                reply = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True
                )
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.02)
    raise RuntimeError(f"[services] not serving in time:\n{log.read_text()[-4000:]}")


@dataclass(slots=True)
class Service:
    """One running process."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout: float = 20.0) -> int:
        """Signals the process, waits, and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return int(self.process.returncode)


@dataclass(slots=True)
class ServicePair:
    """An executor and the schedulers started in front of it, in one private folder."""

    folder: Path
    executor: Service
    schedulers: list[Service] = field(default_factory=list)

    def start_scheduler(self, *flags: str) -> Service:
        """Starts a scheduler; its session replaces the last one's."""
        name = f"s{len(self.schedulers)}"
        service = _start(
            name,
            self.folder,
            "scheduler_service",
            ["--executor", self.executor.address, "--metrics-port", "0", *flags],
        )
        self.schedulers.append(service)
        return service

    def stop(self) -> None:
        """Stops everything, schedulers first."""
        for service in [*self.schedulers, self.executor]:
            service.stop()


def _start(name: str, folder: Path, module: str, flags: list[str]) -> Service:
    address = f"unix:{folder / name}.sock"
    log = folder / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--listen", address, *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            cwd=folder,  # so that the installed packages are used, not a source tree
        )
    service = Service(name, address, process, log)
    try:
        wait_serving(address, process, log)
    except BaseException:
        service.stop()
        raise
    return service


def start_executor(folder: Path, model: str | Path, *flags: str, name: str = "x") -> Service:
    """Starts an executor for `model` (an alias or a path)."""
    return _start(
        name, folder, "executor_service", ["--model", str(model), "--metrics-port", "0", *flags]
    )


@contextlib.contextmanager
def running_pair(
    model: str | Path,
    *,
    executor_flags: tuple[str, ...] = (),
    scheduler_flags: tuple[str, ...] = (),
) -> Iterator[ServicePair]:
    """A private executor and scheduler; `schedulers[0]` is the scheduler."""
    # Not pytest's folder: a socket path has at most about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    try:
        pair = ServicePair(folder, start_executor(folder, model, *executor_flags))
        try:
            pair.start_scheduler(*scheduler_flags)
            yield pair
        finally:
            pair.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
