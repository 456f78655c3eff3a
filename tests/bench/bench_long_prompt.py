"""Streams that decode while a long prompt arrives: the gaps it makes, and what the bound costs.

    python tests/bench/bench_long_prompt.py --streams 8 --tokens 700 --prompt 6000 --rounds 3

Two pairs of processes take turns, round by round: one with the bound on a step that the scheduler
derives from the executor's cost curve (or `--max-step-ms`), one with a bound so high that chunks
are as long as the other limits allow. The work of a round is always the same: every stream's
tokens and one prompt, which no cache knows. A gap is the time between two messages of a stream
from the prompt's arrival to its first token. Medians over rounds, and a JSON file with all values.
Where other work runs on the machine, a real-time priority keeps it out: put `chrt -r 10` in front.
Linux then holds these processes up for 50 ms once in a second (`sched_rt_runtime_us`), which shows
in the p99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, GenerationParams, TokenEvent
from tests.bench.bench_serving import machine
from tests.support.services import running_pair
from tests.support.tiny_pair import free_port

UNBOUNDED_MS = 1e6
# Tokens that each stream has before the prompt arrives.
LEAD = 20
# Most ids that any of the models knows as plain text.
MAX_ID = 250


@dataclass(frozen=True, slots=True)
class Sample:
    """One round."""

    mode: str
    bound_ms: float  # in force when the prompt was read; 0 without a cost curve
    gap_ms_p50: float  # while the prompt was read
    gap_ms_p95: float
    gap_ms_p99: float
    gap_ms_max: float
    prompt_ttft_ms: float
    tokens_per_second: float  # prompt and generated tokens over the wall time of the round


async def _stream(
    client: AsyncClient, prompt: list[int], num_tokens: int, arrivals: list[float],
    has_lead: asyncio.Event,
) -> None:  # fmt: skip
    count = 0
    params = GenerationParams(max_tokens=num_tokens, ignore_eos=True)
    async with await client.generate(prompt, params) as stream:
        async for event in stream:
            if isinstance(event, TokenEvent):
                arrivals.append(time.perf_counter())
                count += len(event.token_ids)
                if count >= LEAD:
                    has_lead.set()


async def one_round(
    address: str, port: int, num_streams: int, num_tokens: int, num_prompt_tokens: int, seed: int
) -> tuple[list[float], float, float, float]:
    """Return the gaps while the prompt was read, the bound then, its TTFT and tokens a second."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, MAX_ID) for _ in range(count)]

    arrivals: list[list[float]] = [[] for _ in range(num_streams)]
    leads = [asyncio.Event() for _ in range(num_streams)]
    prompt_arrivals: list[float] = []
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        started = time.perf_counter()
        for each, lead in zip(arrivals, leads, strict=True):
            group.create_task(_stream(client, ids(6), num_tokens, each, lead))
        for lead in leads:
            await lead.wait()
        sent = time.perf_counter()
        await _stream(client, ids(num_prompt_tokens), 1, prompt_arrivals, asyncio.Event())
        bound = await asyncio.to_thread(bound_ms, port)
    ended = max(each[-1] for each in arrivals)
    first = prompt_arrivals[0]
    if min(each[-1] for each in arrivals) < first:
        late = sum(each[-1] < first for each in arrivals)
        raise RuntimeError(
            f"[bench] streams must outlast the prompt, which took {first - sent:.1f} s; {late} did "
            "not: ask for more --tokens"
        )
    gaps = [
        after - before
        for each in arrivals
        for before, after in itertools.pairwise(each)
        if after > sent and before < first
    ]
    total = num_streams * num_tokens + num_prompt_tokens + 1
    return gaps, bound, first - sent, total / (max(ended, first) - started)


def bound_ms(port: int) -> float:
    """Return the bound in force, from the scheduler's metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("isobatch_scheduler_step_bound_seconds{"):
                return 1e3 * float(line.split()[-1])
    return 0.0


def measure(args: argparse.Namespace) -> list[Sample]:
    """Run all rounds, the two pairs in turns."""
    modes = {"bounded": args.max_step_ms, "unbounded": UNBOUNDED_MS}
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        ports = {mode: free_port() for mode in modes}
        addresses = {}
        for mode, limit in modes.items():
            flags = ("--max-step-ms", str(limit), "--metrics-port", str(ports[mode]))
            pair = stack.enter_context(
                running_pair(
                    args.model,
                    executor_flags=("--profile", args.profile, "--threads", str(args.threads)),
                    scheduler_flags=flags,
                )
            )
            addresses[mode] = pair.schedulers[0].address
        for index in range(args.rounds + 1):
            for mode, address in addresses.items():
                num_prompt_tokens = args.prompt if index else args.prompt // 4
                gaps, bound, ttft, rate = asyncio.run(
                    one_round(
                        address, ports[mode], args.streams, args.tokens, num_prompt_tokens, index
                    )
                )
                if index == 0:
                    continue  # touches memory and lets the pace settle
                gaps.sort()
                samples.append(
                    Sample(
                        mode=mode,
                        bound_ms=bound,
                        gap_ms_p50=1e3 * gaps[len(gaps) // 2],
                        gap_ms_p95=1e3 * gaps[len(gaps) * 95 // 100],
                        gap_ms_p99=1e3 * gaps[len(gaps) * 99 // 100],
                        gap_ms_max=1e3 * gaps[-1],
                        prompt_ttft_ms=1e3 * ttft,
                        tokens_per_second=rate,
                    )
                )
    return samples


def main() -> None:
    """Parse flags, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=700, help="tokens of each stream")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-step-ms", type=float, default=0.0, help="0 derives it")
    parser.add_argument("--threads", type=int, default=0, help="of the executors; 0 takes all")
    parser.add_argument("--profile", default="measure", help="of the executors")
    parser.add_argument("--json", default="bench-results/long_prompt.json")
    args = parser.parse_args()
    samples = measure(args)
    names = [name for name in Sample.__slots__ if name != "mode"]
    print(f"{'mode':>10} " + " ".join(f"{name:>17}" for name in names))
    for mode in ("bounded", "unbounded"):
        rounds = [sample for sample in samples if sample.mode == mode]
        values = [statistics.median(getattr(sample, name) for sample in rounds) for name in names]
        print(f"{mode:>10} " + " ".join(f"{value:>17.1f}" for value in values))
    report = {
        "machine": machine(),
        "settings": vars(args),
        "samples": [asdict(sample) for sample in samples],
    }
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
