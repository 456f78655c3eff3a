"""Throughput and latency of the whole stack: SDK, scheduler, executor, real model.

    python tests/bench/bench_serving.py --streams 1,2,4,8,16 --tokens 128 --rounds 3

Every stream asks for the same number of tokens with another prompt. The stream counts are
interleaved round by round, because a shared machine changes its speed over minutes; the medians
over rounds are printed with the raw values, and everything goes to a JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, Finished, GenerationParams, TokenEvent
from tests.support.services import ServicePair, running_pair

TOPICS = (
    "a river delta", "the history of tea", "how bridges carry load", "a lighthouse keeper",
    "training a puppy", "the night sky in winter", "baking rye bread", "a chess opening",
    "repairing a bicycle", "coral reefs", "the first railways", "growing tomatoes",
    "a mountain hut", "how clocks work", "river otters", "learning the violin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One round at one number of streams."""

    num_streams: int
    tokens_per_second: float  # all generated tokens over the wall time of the round
    decode_tokens_per_second: float  # the same after the last stream's first token
    ttft_ms: float  # median over streams
    itl_ms_p50: float  # gaps between messages, over all streams
    itl_ms_p99: float


async def one_stream(client: AsyncClient, index: int, num_tokens: int) -> list[tuple[float, int]]:
    """Runs one request; returns (arrival time in seconds, number of tokens) of each message."""
    topic = TOPICS[index % len(TOPICS)]
    arrivals: list[tuple[float, int]] = []
    stream = await client.generate(
        f"Here is a short text, part {index}, about {topic}. It begins like this:",
        GenerationParams(max_tokens=num_tokens, ignore_eos=True),
    )
    async with stream:
        async for event in stream:
            if isinstance(event, TokenEvent):
                arrivals.append((time.perf_counter(), len(event.token_ids)))
            elif isinstance(event, Finished):
                generated = event.usage.num_generated_tokens
                if generated != num_tokens:
                    raise RuntimeError(f"[bench] wanted {num_tokens} tokens, got {generated}")
    return arrivals


async def one_round(address: str, num_streams: int, num_tokens: int) -> Sample:
    """Runs `num_streams` requests at once."""
    async with AsyncClient(address) as client:
        started = time.perf_counter()
        streams = await asyncio.gather(
            *(one_stream(client, index, num_tokens) for index in range(num_streams))
        )
    ended = max(arrivals[-1][0] for arrivals in streams)
    total = sum(count for arrivals in streams for _, count in arrivals)
    all_started = max(arrivals[0][0] for arrivals in streams)
    late = sum(count for arrivals in streams for at, count in arrivals if at > all_started)
    gaps = sorted(
        after[0] - before[0]
        for arrivals in streams
        for before, after in itertools.pairwise(arrivals)
    )
    return Sample(
        num_streams=num_streams,
        tokens_per_second=total / (ended - started),
        decode_tokens_per_second=late / (ended - all_started),
        ttft_ms=1e3 * statistics.median(arrivals[0][0] - started for arrivals in streams),
        itl_ms_p50=1e3 * gaps[len(gaps) // 2],
        itl_ms_p99=1e3 * gaps[len(gaps) * 99 // 100],
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit,
    }


def measure(
    pair: ServicePair, counts: list[int], num_tokens: int, num_rounds: int
) -> dict[int, list[Sample]]:
    """Interleaved rounds after one warm-up at the largest count."""
    address = pair.schedulers[0].address
    asyncio.run(one_round(address, max(counts), min(num_tokens, 16)))
    samples: dict[int, list[Sample]] = {count: [] for count in counts}
    for _ in range(num_rounds):
        for count in counts:
            samples[count].append(asyncio.run(one_round(address, count, num_tokens)))
    return samples


def main() -> None:
    """Parses flags, measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit", default="auto", help="kernel unit of the executor")
    parser.add_argument("--json", default="bench-results/serving.json")
    args = parser.parse_args()
    counts = [int(count) for count in args.streams.split(",")]
    with running_pair(args.model, executor_flags=("--unit", args.unit)) as pair:
        samples = measure(pair, counts, args.tokens, args.rounds)
    head = ("streams", "tok/s", "decode", "TTFT ms", "ITL p50", "p99")
    print(f"{head[0]:>7} " + " ".join(f"{name:>8}" for name in head[1:]) + "  rounds")
    for count, rounds in samples.items():
        middle = [
            statistics.median(getattr(sample, name) for sample in rounds)
            for name in (
                "tokens_per_second",
                "decode_tokens_per_second",
                "ttft_ms",
                "itl_ms_p50",
                "itl_ms_p99",
            )
        ]
        raw = " ".join(f"{sample.tokens_per_second:.0f}" for sample in rounds)
        print(f"{count:>7} " + " ".join(f"{value:>8.1f}" for value in middle) + f"  {raw}")
    report = {
        "machine": machine(),
        "model": args.model,
        "unit": args.unit,
        "tokens": args.tokens,
        "samples": [asdict(sample) for rounds in samples.values() for sample in rounds],
    }
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
