"""Speculation by kind of text: speed with and without, and what is accepted.

    python tests/bench/bench_speculation.py --streams 1,4,8 --tokens 160 --rounds 5

One pair of processes serves both: a request may do without speculation. In each round every kind
of text runs once without and once with it, one after the other, because a shared machine changes
its speed over minutes; the figures are medians over rounds of the two in the same round. The
tokens of both are compared, and a difference is an error. The processor time of both processes is
kept as well, prompts included: other work on the machine disturbs it less than the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, ChatMessage, Completion, GenerationParams, Prompt
from tests.bench.bench_serving import machine
from tests.bench.speculation_texts import KINDS, prompt
from tests.support import services as support
from tests.support.services import ServicePair, running_pair

# Sampled hot, a story repeats little, and nothing that was seen says what comes next.
SAMPLED = "story, temperature 1.3"


@dataclass(frozen=True, slots=True)
class Sample:
    """One kind of text at one number of streams, with or without speculation."""

    kind: str
    num_streams: int
    is_speculative: bool
    num_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    seconds: float  # after the first token, summed over streams
    processor_seconds: float  # of both processes, prompts included


def request(kind: str, index: int, num_tokens: int, *, is_speculative: bool) -> tuple[
    Prompt, GenerationParams
]:  # fmt: skip
    """Return the prompt and parameters of one stream."""
    words = prompt("story" if kind == SAMPLED else kind, index)
    params = GenerationParams(
        max_tokens=num_tokens,
        temperature=1.3 if kind == SAMPLED else 0.0,
        seed=index,
        disable_speculation=not is_speculative,
    )
    return (words if kind == "code edit" else (ChatMessage("user", words),)), params


async def one_round(
    pair: ServicePair, kind: str, users: range, num_tokens: int, *, is_speculative: bool
) -> tuple[Sample, list[tuple[int, ...]]]:
    """Run the streams at once; return what was measured and the tokens of each."""

    async def one(client: AsyncClient, index: int) -> Completion:
        words, params = request(kind, index, num_tokens, is_speculative=is_speculative)
        async with await client.generate(words, params) as stream:
            return await stream.completion()

    used = processor_seconds(pair)
    async with AsyncClient(pair.schedulers[0].address) as client:
        results = await asyncio.gather(*(one(client, index) for index in users))
    usages = [completion.usage for completion in results]
    sample = Sample(
        kind=kind,
        num_streams=len(users),
        is_speculative=is_speculative,
        num_tokens=sum(usage.num_generated_tokens for usage in usages),
        num_draft_tokens=sum(usage.num_draft_tokens for usage in usages),
        num_accepted_draft_tokens=sum(usage.num_accepted_draft_tokens for usage in usages),
        seconds=sum(
            completion.timings.total_seconds - completion.timings.time_to_first_token_seconds
            for completion in results
        ),
        processor_seconds=processor_seconds(pair) - used,
    )
    return sample, [completion.token_ids for completion in results]


def processor_seconds(pair: ServicePair) -> float:
    """Return the processor time that both processes have used."""
    times = [
        psutil.Process(service.process.pid).cpu_times()
        for service in (pair.executor, pair.schedulers[0])
    ]
    return sum(each.user + each.system for each in times)


def measure(
    services: ServicePair, kinds: list[str], counts: list[int], num_tokens: int, num_rounds: int
) -> list[Sample]:
    """Run everything in turn, after a round that is not counted."""
    samples: list[Sample] = []
    for number in range(num_rounds + 1):
        for kind in kinds:
            for count in counts:
                # Who goes first changes from round to round.
                order = (False, True) if number % 2 else (True, False)
                # Other users in each round: a single stream would tell of one text alone.
                users = range(number * count, (number + 1) * count)
                pair = [
                    asyncio.run(
                        one_round(services, kind, users, num_tokens, is_speculative=speculative)
                    )
                    for speculative in order
                ]
                if pair[0][1] != pair[1][1]:
                    raise RuntimeError(f"[bench] {kind}, {count} streams: tokens differ")
                if number:
                    samples += [sample for sample, _ in pair]
    return samples


def table(samples: list[Sample]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| text | streams | drafted a token | accepted | tokens/s off | with "
        "| ratio (all) | ratio of processor time (all) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, count in dict.fromkeys((each.kind, each.num_streams) for each in samples):
        mine = [each for each in samples if (each.kind, each.num_streams) == (kind, count)]
        on = [each for each in mine if each.is_speculative]
        off = [each for each in mine if not each.is_speculative]
        pairs = list(zip(off, on, strict=True))
        times = [a.seconds / b.seconds for a, b in pairs]
        work = [a.processor_seconds / b.processor_seconds for a, b in pairs]
        drafted = sum(each.num_draft_tokens for each in on)
        accepted = sum(each.num_accepted_draft_tokens for each in on)
        speeds = [
            statistics.median(each.num_tokens * count / each.seconds for each in some)
            for some in (off, on)
        ]
        share = f"{accepted / drafted:.0%}" if drafted else "none"
        lines.append(
            f"| {kind} | {count} | {drafted / sum(each.num_tokens for each in on):.2f} "
            f"| {share} | {speeds[0]:.0f} | {speeds[1]:.0f} "
            f"| {_ratios(times)} | {_ratios(work)} |"
        )
    return lines


def _ratios(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({' '.join(f'{value:.2f}' for value in values)})"


def main() -> None:
    """Parse flags, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--kinds", default=";".join((*KINDS, SAMPLED)))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--json", default="bench-results/speculation.json")
    args = parser.parse_args()
    # A first start measures the model's profile, and a busy machine takes its time.
    support.START_TIMEOUT_SECONDS = 600.0
    counts = [int(count) for count in args.streams.split(",")]
    flags = ("--speculation", "lookup", "--max-draft-tokens", str(args.max_draft_tokens))
    with running_pair(args.model, scheduler_flags=flags) as pair:
        samples = measure(pair, args.kinds.split(";"), counts, args.tokens, args.rounds)
    print("\n".join(table(samples)))
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": machine(),
        "model": args.model,
        "tokens": args.tokens,
        "max_draft_tokens": args.max_draft_tokens,
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
