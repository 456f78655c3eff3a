"""Measures the resident memory of both services: after start, and after a load of streams.

Usage: python tests/bench/bench_memory.py [--model ALIAS_OR_PATH] [--streams 8] [--answers 32]

Weights are counted as stored, each once; the pool is what the cache may grow to. The target
is weights + pool + 250 MB over both processes, the goal 150 MB. A pool that is small enough to be
filled (--kv-memory-mb 64) tells most: of a large one only what was used is resident. Libraries that
both processes map are counted once, by proportional set size, where the system tells it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from executor_service.models.registry import locate
from tests.support.services import ServicePair, running_pair
from tests.support.steady_load import steady_load
from tests.support.tiny_pair import free_port

MB = 1_000_000


def resident(pid: int) -> dict[str, float]:
    """Return resident, proportional and file-backed memory of a process in MB."""
    process = psutil.Process(pid)
    full = process.memory_full_info()
    found = {"rss": full.rss / MB, "pss": getattr(full, "pss", full.rss) / MB}
    found["file"] = getattr(process.memory_info(), "shared", 0) / MB
    return {name: round(value, 1) for name, value in found.items()}


def value(page: str, pattern: str) -> float:
    """Return a sample of a metrics page."""
    found = re.search(rf"^{pattern} (\S+)$", page, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"[bench_memory] the page must have {pattern}")
    return float(found[1])


def reading(pair: ServicePair, port: int, weights_mb: float) -> dict[str, Any]:
    """Return what both processes hold now."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        page = reply.read().decode()
    pool = value(page, r'isobatch_executor_memory_bytes\{kind="kv_pool"\}') / MB
    found: dict[str, Any] = {
        "executor": resident(pair.executor.process.pid),
        "scheduler": resident(pair.schedulers[0].process.pid),
        "kv_pool_mb": round(pool, 1),
    }
    total = found["executor"]["pss"] + found["scheduler"]["pss"]
    found["total_pss_mb"] = round(total, 1)
    found["beyond_weights_and_pool_mb"] = round(total - weights_mb - pool, 1)
    found["beyond_weights_mb"] = round(total - weights_mb, 1)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kv-memory-mb", type=int, default=0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = locate(options.model, None).path
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    weights_mb = sum(each.stat().st_size for each in files) / MB
    port = free_port()
    flags = ("--metrics-port", str(port), "--kv-memory-mb", str(options.kv_memory_mb))
    scheduler = ("--metrics-port", "0")
    with running_pair(options.model, executor_flags=flags, scheduler_flags=scheduler) as pair:
        readings: dict[str, Any] = {"start": reading(pair, port, weights_mb)}
        with steady_load(pair.schedulers[0].address, num_streams=options.streams) as load:
            while load.num_answers < options.answers and not load.errors:
                time.sleep(0.2)
        readings["after load"] = reading(pair, port, weights_mb)
    readings["weights_mb"] = round(weights_mb, 1)
    print(json.dumps(readings, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(readings, indent=1) + "\n")


if __name__ == "__main__":
    main()
