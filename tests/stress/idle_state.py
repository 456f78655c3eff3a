"""What must be back when no request is live: counts, blocks, threads, descriptors, memory."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from scheduler_service.client import Client, Stats

IDLE_SECONDS: Final = 30.0
# gRPC's and asyncio's pools grow with load and shrink by a rule of their own; a leak of a thread
# per request or per connection is far above this.
MOST_NEW_THREADS: Final = 8
_LABELS: Final = ("outcome", "state", "reason")
_MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """What the operating system counts for a process."""

    pid: int
    num_threads: int
    num_descriptors: int
    num_children: int
    resident_mebibytes: float


@dataclass(frozen=True, slots=True)
class Watched:
    """Where a pair of services is looked at."""

    scheduler_address: str
    scheduler_pid: int
    scheduler_metrics_port: int
    executor_address: str
    executor_pid: int
    executor_metrics_port: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at an idle pair."""

    scheduler: ProcessCounts
    executor: ProcessCounts
    # Since the scheduler's start: requests that ended, by outcome, and preemptions, by reason.
    outcomes: Mapping[str, float]
    preemptions: Mapping[str, float]
    stats: Stats


def _process(pid: int) -> ProcessCounts:
    process = psutil.Process(pid)
    with process.oneshot():
        return ProcessCounts(
            pid=pid,
            num_threads=process.num_threads(),
            num_descriptors=process.num_fds(),
            num_children=len(process.children()),
            resident_mebibytes=process.memory_info().rss / _MEBIBYTE,
        )


def _samples(port: int) -> dict[tuple[str, str], float]:
    """Return metrics by (name, the label that tells series apart)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        (sample.name, next((sample.labels[k] for k in _LABELS if k in sample.labels), "")): float(
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _series(samples: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    return {label: value for (each, label), value in samples.items() if each == name}


def _health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply: health_pb2.HealthCheckResponse = stub.Check(
            health_pb2.HealthCheckRequest(), timeout=10.0
        )
        return reply.status


def _live(watched: Watched) -> tuple[list[str], Stats, dict[tuple[str, str], float]]:
    """Return what is still in use, the statistics, and the scheduler's metrics."""
    found = []
    for name, address in (
        ("scheduler", watched.scheduler_address), ("executor", watched.executor_address),
    ):  # fmt: skip
        if _health(address) != health_pb2.HealthCheckResponse.SERVING:
            found.append(f"the {name} is not serving")
    with Client(watched.scheduler_address) as client:
        stats = client.stats()
    if stats.num_running or stats.num_waiting:
        found.append(f"{stats.num_running} requests run and {stats.num_waiting} wait")
    if stats.free_blocks != stats.total_blocks:
        found.append(f"{stats.free_blocks} of {stats.total_blocks} blocks are free")
    scheduler = _samples(watched.scheduler_metrics_port)
    for name in ("requests_running", "requests_waiting"):
        value = scheduler[f"isobatch_scheduler_{name}", ""]
        if value:
            found.append(f"the gauge {name} is {value:g}")
    executor = _samples(watched.executor_metrics_port)
    blocks = _series(executor, "isobatch_executor_kv_blocks")
    if blocks["active"] or sum(blocks.values()) != stats.total_blocks:
        found.append(f"the executor's blocks are {blocks}, of {stats.total_blocks}")
    return found, stats, scheduler


def grown(name: str, now: ProcessCounts, base: ProcessCounts) -> list[str]:
    """Return what a process holds beyond its baseline, memory aside."""
    found = []
    if now.num_descriptors > base.num_descriptors:
        found.append(f"{name}: {now.num_descriptors} descriptors, before {base.num_descriptors}")
    if now.num_threads > base.num_threads + MOST_NEW_THREADS:
        found.append(f"{name}: {now.num_threads} threads, before {base.num_threads}")
    if now.num_children > base.num_children:
        found.append(f"{name}: {now.num_children} child processes, before {base.num_children}")
    return found


def wait_idle(watched: Watched, base: Snapshot | None = None) -> tuple[Snapshot, list[str]]:
    """Wait until everything is back, and return the last look and what is not back by then.

    Threads, descriptors and children are compared with `base`, where the process is the same.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        found, stats, samples = _live(watched)
        time.sleep(0.05)  # the connections of this very look
        snapshot = Snapshot(
            _process(watched.scheduler_pid),
            _process(watched.executor_pid),
            _series(samples, "isobatch_scheduler_requests_total"),
            _series(samples, "isobatch_scheduler_preemptions_total"),
            stats,
        )
        if base is not None:
            found += grown("scheduler", snapshot.scheduler, base.scheduler)
            if base.executor.pid == snapshot.executor.pid:
                found += grown("executor", snapshot.executor, base.executor)
        if not found or time.monotonic() > deadline:
            return snapshot, found
        time.sleep(0.1)


def memory_growth(first: Snapshot, last: Snapshot, limit_mebibytes: float) -> list[str]:
    """Return what the resident memory of either process grew by, where it is beyond the limit."""
    found = []
    for name in ("scheduler", "executor"):
        before: ProcessCounts = getattr(first, name)
        after: ProcessCounts = getattr(last, name)
        grown = after.resident_mebibytes - before.resident_mebibytes
        if before.pid == after.pid and grown > limit_mebibytes:
            found.append(f"{name}: {grown:.1f} MiB of memory more than after the first such round")
    return found
