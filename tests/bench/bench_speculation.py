"""Speculation by kind of text: speed with each proposer and without, and what is accepted.

    python tests/bench/bench_speculation.py --streams 1,4,8 --tokens 160 --rounds 5
    python tests/bench/bench_speculation.py --draft-model smollm2-draft --modes off,lookup,auto

Each mode has a pair of processes of its own; those that have no turn sleep. In each round every
kind of text runs once in each mode, one after the other, because a shared machine changes its
speed over minutes; the figures are medians over rounds of the mode and `off` in the same round.
The tokens of all modes are compared, and a difference is an error. The processor time of both
processes is kept as well, prompts included: other work on the machine disturbs it less than the
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
    mode: str  # off, lookup, draft or auto
    num_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    seconds: float  # after the first token, summed over streams
    processor_seconds: float  # of both processes, prompts included


def request(kind: str, index: int, num_tokens: int) -> tuple[Prompt, GenerationParams]:
    """Return the prompt and parameters of one stream."""
    words = prompt("story" if kind == SAMPLED else kind, index)
    params = GenerationParams(
        max_tokens=num_tokens,
        temperature=1.3 if kind == SAMPLED else 0.0,
        seed=index,
    )
    return (words if kind == "code edit" else (ChatMessage("user", words),)), params


async def one_round(
    mode: str, pair: ServicePair, kind: str, users: range, num_tokens: int
) -> tuple[Sample, list[tuple[int, ...]]]:
    """Run the streams at once; return what was measured and the tokens of each."""

    async def one(client: AsyncClient, index: int) -> Completion:
        words, params = request(kind, index, num_tokens)
        async with await client.generate(words, params) as stream:
            return await stream.completion()

    used = processor_seconds(pair)
    async with AsyncClient(pair.schedulers[0].address) as client:
        results = await asyncio.gather(*(one(client, index) for index in users))
    usages = [completion.usage for completion in results]
    sample = Sample(
        kind=kind,
        num_streams=len(users),
        mode=mode,
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
    pairs: dict[str, ServicePair],
    kinds: list[str],
    counts: list[int],
    num_tokens: int,
    num_rounds: int,
) -> list[Sample]:
    """Run everything in turn, after a round that is not counted."""
    samples: list[Sample] = []
    modes = list(pairs)
    for number in range(num_rounds + 1):
        for kind in kinds:
            for count in counts:
                # Who goes first changes from round to round.
                turn = number % len(modes)
                order = [*modes[turn:], *modes[:turn]]
                # Other users in each round: a single stream would tell of one text alone.
                users = range(number * count, (number + 1) * count)
                found = [
                    asyncio.run(one_round(mode, pairs[mode], kind, users, num_tokens))
                    for mode in order
                ]
                if any(tokens != found[0][1] for _, tokens in found):
                    raise RuntimeError(f"[bench] {kind}, {count} streams: tokens differ")
                if number:
                    samples += [sample for sample, _ in found]
    return samples


def table(samples: list[Sample]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| text | streams | drafts by | drafted a token | accepted | tokens/s off | with "
        "| ratio (all) | ratio of processor time (all) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, count in dict.fromkeys((each.kind, each.num_streams) for each in samples):
        mine = [each for each in samples if (each.kind, each.num_streams) == (kind, count)]
        off = [each for each in mine if each.mode == "off"]
        for mode in dict.fromkeys(each.mode for each in mine if each.mode != "off"):
            on = [each for each in mine if each.mode == mode]
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
                f"| {kind} | {count} | {mode} "
                f"| {drafted / sum(each.num_tokens for each in on):.2f} "
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
    parser.add_argument("--draft-model", default="", help="of modes draft and auto")
    parser.add_argument("--modes", default="off,lookup", help="of off, lookup, draft, auto")
    parser.add_argument("--json", default="bench-results/speculation.json")
    args = parser.parse_args()
    # A first start measures the model's profile, and a busy machine takes its time.
    support.START_TIMEOUT_SECONDS = 600.0
    counts = [int(count) for count in args.streams.split(",")]
    with contextlib.ExitStack() as stack:
        pairs = {
            mode: stack.enter_context(
                running_pair(
                    args.model,
                    executor_flags=("--draft-model", args.draft_model)
                    if mode in ("draft", "auto")
                    else (),
                    scheduler_flags=(
                        "--speculation", mode, "--max-draft-tokens", str(args.max_draft_tokens)
                    ),
                )
            )
            for mode in args.modes.split(",")
        }  # fmt: skip
        samples = measure(pairs, args.kinds.split(";"), counts, args.tokens, args.rounds)
    print("\n".join(table(samples)))
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": machine(),
        "model": args.model,
        "tokens": args.tokens,
        "max_draft_tokens": args.max_draft_tokens,
        "draft_model": args.draft_model,
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
