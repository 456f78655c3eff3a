"""What a decode step costs beside its forward pass, in four places.

    python tests/bench/bench_step_overhead.py --streams 1,8 --tokens 128 --rounds 5

- `engine`: the backend in this process, called back to back.
- `grpc`: an executor process behind a bare client that sends greedy steps.
- `plain`: SDK, scheduler and executor, each step sent after the answer to the last one; a step is
  the gap between two messages of a stream.
- `ahead`: the same, with one step sent ahead (the scheduler's `lookahead`).

All four decode the same number of tokens at the same positions with the same kernels. They take
turns round by round, because a shared machine changes its speed over minutes. Medians over rounds
are printed with the raw values, and everything goes to a JSON file. Where other work runs on the
machine, a real-time priority keeps it out of the figures: put `chrt -r 10` in front.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

sys.path.append(str(Path(__file__).resolve().parents[2]))

from executor_service.engine.backends import BLOCK_SIZE
from executor_service.models.load import load_model
from executor_service.models.registry import locate
from isobatch_kernels.dispatch import create_backend
from isobatch_kernels.step import Stat, StepInput
from scheduler_service.client import AsyncClient, GenerationParams, TokenEvent
from tests.bench.bench_serving import machine
from tests.support.executor_harness import OPTIONS, SessionClient, step_message
from tests.support.services import running_pair, start_executor
from tests.support.tiny_pair import free_port

PROMPT_TOKENS = 16
# Steps at the start of a round that are not counted: the prompt, and whatever is cold.
SKIPPED = 4
MAX_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: medians over its decode steps, in milliseconds."""

    wall: float
    forward: float
    # What the place says about its parts: medians for `grpc`, means for `plain` and `ahead`.
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def outside(self) -> float:
        """The part of a step that is not the forward pass and its statistics."""
        return self.wall - self.forward


class EngineAlone:
    """The backend, called with ready arrays."""

    def __init__(self, model: str, unit: str) -> None:
        program = load_model(locate(model, None)).program
        self._backend = create_backend(
            program,
            num_blocks=256,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_STREAMS,
            max_num_batched_tokens=MAX_STREAMS * PROMPT_TOKENS,
            unit=unit,
            num_threads=0,
        )

    def round(self, num_streams: int, num_tokens: int) -> Sample:
        """Decode `num_tokens` tokens of each stream."""
        width = -(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE)
        tables = np.arange(num_streams * width, dtype=np.int32).reshape(num_streams, width)
        self._backend.zero_blocks(tables.reshape(-1))
        tokens = np.arange(num_streams * PROMPT_TOKENS, dtype=np.int32) + 100
        start, walls, forwards = 0, [], []
        for _ in range(num_tokens):
            step = _step_input(tokens, tables, start)
            started = time.perf_counter_ns()
            output = self._backend.run(step)
            walls.append(time.perf_counter_ns() - started)
            forwards.append(output.forward_ns + output.statistics_ns)
            start += len(tokens) // num_streams
            tokens = output.argmax_ids.copy()
        return Sample(_median_ms(walls), _median_ms(forwards))


class BareClient:
    """A client that keeps one executor busy with greedy steps, and does nothing else."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._address = address
        self._epoch = 0

    def round(self, num_streams: int, num_tokens: int) -> Sample:
        """Decode `num_tokens` tokens of each stream."""
        return self._loop.run_until_complete(self._round(num_streams, num_tokens))

    async def _round(self, num_streams: int, num_tokens: int) -> Sample:
        self._epoch += 1
        walls, timings = [], []
        async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
            client = SessionClient(channel)
            await client.start(self._epoch)
            ids = range(1, num_streams + 1)
            await client.open(*ids)
            prompt = np.arange(num_streams * PROMPT_TOKENS, dtype=np.int32) + 100
            tokens, start = prompt.reshape(num_streams, -1), 0
            for step_id in range(1, num_tokens + 1):
                rows = [(key, row.tolist(), start) for key, row in zip(ids, tokens, strict=True)]
                message = step_message(step_id, rows)
                started = time.perf_counter_ns()
                result = await client.step(message)
                walls.append(time.perf_counter_ns() - started)
                timings.append(result.timings)
                start += tokens.shape[1]
                tokens = np.frombuffer(result.argmax_ids, np.int32).reshape(num_streams, 1)
            client.call.cancel()
        spent = {
            name: [getattr(each, f"{name}_ns") for each in timings]
            for name in ("queue", "prepare", "forward", "statistics", "total")
        }
        spent["other"] = [
            each.total_ns - each.queue_ns - each.prepare_ns - each.forward_ns - each.statistics_ns
            for each in timings
        ]
        spent["transport"] = [
            wall - each.total_ns for wall, each in zip(walls, timings, strict=True)
        ]
        parts = {name: _median_ms(values) for name, values in spent.items()}
        return Sample(_median_ms(walls), parts["forward"] + parts["statistics"], parts)


class WholeStack:
    """A real client of a scheduler in front of an executor."""

    def __init__(
        self, address: str, pages: dict[str, int], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._address = address
        self._pages = pages
        self._loop = loop

    def round(self, num_streams: int, num_tokens: int) -> Sample:
        """Decode `num_tokens` tokens of each stream."""
        before = self._phases()
        gaps = self._loop.run_until_complete(self._round(num_streams, num_tokens))
        after = self._phases()
        parts = {
            name: 1e3 * (seconds - before[name][0]) / (count - before[name][1])
            for name, (seconds, count) in after.items()
            if count > before[name][1]
        }
        forward = parts["executor_forward"] + parts["executor_statistics"]
        return Sample(_median_ms(gaps), forward, parts)

    async def _round(self, num_streams: int, num_tokens: int) -> list[int]:
        async with AsyncClient(self._address) as client:
            arrivals = await asyncio.gather(
                *(_stream(client, index, num_tokens) for index in range(num_streams))
            )
        # Where messages were merged, their gap is that of several tokens.
        return [
            (after[0] - before[0]) // after[1]
            for stream in arrivals
            for before, after in itertools.pairwise(stream[SKIPPED:])
        ]

    def _phases(self) -> dict[str, tuple[float, float]]:
        """Return (seconds, steps) so far of every phase of both processes.

        `cpu` is the processor time of a whole process, the executor's kernels included.
        """
        found: dict[str, dict[str, float]] = {}
        for name, port in self._pages.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                text = page.read().decode()
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_step_phase_seconds"):
                    for sample in family.samples:
                        kind = sample.name.rpartition("_")[2]
                        key = f"{name}_{sample.labels['phase']}"
                        found.setdefault(key, {})[kind] = sample.value
                elif family.name == "process_cpu_seconds":
                    found[f"{name}_cpu"] = {"sum": family.samples[0].value}
            found[f"{name}_cpu"]["count"] = found[f"{name}_forward"]["count"]
        return {key: (each["sum"], each["count"]) for key, each in found.items()}


async def _stream(client: AsyncClient, index: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return (arrival in nanoseconds, number of tokens) of each message."""
    params = GenerationParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    stream = await client.generate(f"Part {index} of a short text about rivers and tea:", params)
    async with stream:
        return [
            (time.perf_counter_ns(), len(event.token_ids))
            async for event in stream
            if isinstance(event, TokenEvent)
        ]


def _step_input(tokens: Any, tables: Any, start: int) -> StepInput:
    """A greedy step of equally long rows that all begin at `start`."""
    rows = len(tables)
    each = len(tokens) // rows
    row_starts = np.arange(rows + 1, dtype=np.int32) * each
    return StepInput(
        token_ids=tokens,
        positions=np.tile(np.arange(start, start + each, dtype=np.int32), rows),
        query_start_loc=row_starts,
        block_tables=tables,
        wanted=row_starts[1:] - 1,
        statistics=np.full(rows, Stat.ARGMAX, np.uint32),
        top_k=np.zeros(rows, np.int32),
        inverse_temperatures=np.ones(rows, np.float32),
        quantiles=np.zeros(rows, np.float32),
        edit_starts=np.zeros(rows + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
    )


def _median_ms(nanoseconds: list[int]) -> float:
    return statistics.median(nanoseconds[SKIPPED:]) * 1e-6


def _print(count: int, samples: dict[str, list[Sample]]) -> None:
    alone = statistics.median(sample.wall for sample in samples["engine"])
    for place, rounds in samples.items():
        middle = [
            statistics.median(getattr(sample, name) for sample in rounds)
            for name in ("wall", "forward", "outside")
        ]
        raw = " ".join(f"{sample.outside:.2f}" for sample in rounds)
        print(
            f"{count:>7} {place:>7} "
            + " ".join(f"{value:>8.2f}" for value in (*middle, middle[0] - alone))
            + f"  {raw}"
        )
        names = rounds[0].parts
        if names:
            parts = (f"{n} {statistics.median(s.parts[n] for s in rounds):.2f}" for n in names)
            print(" " * 16 + "  ".join(parts))


def main() -> None:
    """Parse flags, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unit", default="auto", help="kernel unit of all four")
    parser.add_argument("--json", default="bench-results/step-overhead.json")
    args = parser.parse_args()
    counts = [int(count) for count in args.streams.split(",")]
    flags = ("--unit", args.unit, "--kv-memory-mb", "256")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ib-")))
        loop = _event_loop()
        stack.callback(loop.close)
        bare = start_executor(folder, args.model, *flags, name="bare")
        stack.callback(bare.stop)
        places: dict[str, Callable[[int, int], Sample]] = {
            "engine": EngineAlone(args.model, args.unit).round,
            "grpc": BareClient(bare.address, loop).round,
        }
        for place, lookahead in (("plain", "off"), ("ahead", "auto")):
            pages = {"scheduler": free_port(), "executor": free_port()}
            pair = stack.enter_context(
                running_pair(
                    args.model,
                    executor_flags=(*flags, "--metrics-port", str(pages["executor"])),
                    scheduler_flags=(
                        "--metrics-port", str(pages["scheduler"]), "--lookahead", lookahead,
                    ),
                )
            )  # fmt: skip
            places[place] = WholeStack(pair.schedulers[0].address, pages, loop).round
        samples: dict[int, dict[str, list[Sample]]] = {
            count: {place: [] for place in places} for count in counts
        }
        for run in places.values():
            run(max(counts), 16)
        for _ in range(args.rounds):
            for count in counts:
                for place, run in places.items():
                    samples[count][place].append(run(count, args.tokens))
    head = ("streams", "place", "wall ms", "forward", "outside", "- engine")
    print(f"{head[0]:>7} {head[1]:>7} " + " ".join(f"{n:>8}" for n in head[2:]) + "  outside")
    for count, each in samples.items():
        _print(count, each)
    report = {
        "machine": machine(),
        "model": args.model,
        "unit": args.unit,
        "tokens": args.tokens,
        "samples": [
            {"streams": count, "place": place, "outside": sample.outside, **asdict(sample)}
            for count, places_of in samples.items()
            for place, rounds in places_of.items()
            for sample in rounds
        ],
    }
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop that the services use as well."""
    try:
        loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    return loop


if __name__ == "__main__":
    main()
