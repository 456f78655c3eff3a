"""The long form of test_same_story: 2,000 tokens, greedy and seeded. Not collected by pytest.

    python tests/e2e/long_story.py

Both requests run alone, then among 16 others that come and go, then with prefill chunks of 512, 64,
7 and 1 tokens. With each chunk size the second half of each story is also asked for as the
continuation of its first half, which makes a prompt of more than 1,000 tokens. Token ids and
digests of whole fp32 logits rows must be equal. The results go to docs/evidence/.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, Completion, GenerationParams, Prompt
from tests.support import machine_facts
from tests.support.embedded_model import embedded_model_path
from tests.support.services import ServicePair, running_pair

PROMPT: Final = "The lighthouse stood at the end of a long stone pier, and every evening the keeper"
NUM_OTHERS: Final = 16
CHUNKS: Final = (512, 64, 7, 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer beside the one that it must equal."""

    story: str
    how: str
    num_tokens: int
    num_equal_ids: int
    num_equal_digests: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """True when every id and every digest is the same."""
        return self.num_equal_ids == self.num_equal_digests == self.num_tokens


def compare(story: str, how: str, got: Completion, ids: tuple[int, ...],
            digests: tuple[bytes, ...], seconds: float) -> Comparison:  # fmt: skip
    """Count how many leading tokens are equal."""

    def num_equal(pairs: itertools.zip_longest[tuple[object, object]]) -> int:
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return Comparison(
        story, how, len(ids),
        num_equal(itertools.zip_longest(got.token_ids, ids)),
        num_equal(itertools.zip_longest(got.logits_digests, digests)),
        seconds,
    )  # fmt: skip


async def ask(address: str, requests: list[tuple[Prompt, GenerationParams]]) -> list[Completion]:
    """Run requests at once."""
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(client.complete(*request) for request in requests))


async def tokenize(address: str) -> tuple[int, ...]:
    """Return the ids of the prompt."""
    async with AsyncClient(address) as client:
        return (await client.tokenize(PROMPT)).token_ids


async def ask_among_others(
    address: str, requests: list[tuple[Prompt, GenerationParams]]
) -> list[Completion]:
    """Run requests at once, with 16 streams of others beside them until they end."""

    async def others(client: AsyncClient, stream: int) -> None:
        await asyncio.sleep(0.1 * stream)
        for number in itertools.count():
            prompt = f"Story {stream}.{number}: " + "once upon a time " * (1 + 7 * (stream % 5))
            await client.complete(
                prompt,
                GenerationParams(
                    max_tokens=10 + 17 * stream, temperature=0.7 * (stream % 3), seed=number,
                    ignore_eos=True,
                ),
            )  # fmt: skip

    async with AsyncClient(address) as client:
        tasks = [asyncio.create_task(others(client, each)) for each in range(NUM_OTHERS)]
        await asyncio.sleep(0.5)
        answers = await asyncio.gather(*(client.complete(*each) for each in requests))
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    if any(not isinstance(each, asyncio.CancelledError) for each in ends):
        raise RuntimeError(f"[long_story] the others must run on, got {ends}")
    return answers


def tell(
    runner: asyncio.Runner, pair: ServicePair, num_tokens: int
) -> tuple[list[Completion], list[Comparison]]:
    """Run everything; return the answers alone and the comparisons with them."""
    greedy = GenerationParams(max_tokens=num_tokens, ignore_eos=True, return_logits_digests=True)
    stories = {"greedy": greedy, "seeded": replace(greedy, temperature=0.9, seed=7)}
    address = pair.schedulers[0].address
    requests: list[tuple[Prompt, GenerationParams]] = [(PROMPT, each) for each in stories.values()]
    started = time.monotonic()
    alone = [runner.run(ask(address, [request]))[0] for request in requests]
    print(f"alone: {time.monotonic() - started:.0f} s", flush=True)
    found: list[Comparison] = []

    def add(how: str, got: list[Completion], skip: int, started: float) -> None:
        seconds = round(time.monotonic() - started, 1)
        for story, answer, wanted in zip(stories, got, alone, strict=True):
            ids, digests = wanted.token_ids[skip:], wanted.logits_digests[skip:]
            found.append(compare(story, how, answer, ids, digests, seconds))
            print(found[-1], flush=True)

    started = time.monotonic()
    add("among 16 others", runner.run(ask_among_others(address, requests)), 0, started)
    half = num_tokens // 2

    prompt_ids = runner.run(tokenize(address))
    continuations: list[tuple[Prompt, GenerationParams]] = [
        (prompt_ids + answer.token_ids[:half], replace(params, max_tokens=num_tokens - half))
        for answer, params in zip(alone, stories.values(), strict=True)
    ]
    for chunk in CHUNKS:
        scheduler = pair.start_scheduler("--max-prefill-chunk", str(chunk))
        started = time.monotonic()
        answers = runner.run(ask(scheduler.address, requests + continuations))
        add(f"prefill chunks of {chunk}", answers[:2], 0, started)
        add(f"second half from a prompt of {len(continuations[0][0])} tokens, chunks of {chunk}",
            answers[2:], half, started)  # fmt: skip
        scheduler.stop()
    return alone, found


def markdown(alone: list[Completion], found: list[Comparison]) -> str:
    """Return the page of evidence."""
    lines = [
        "# Same prompt, same story: the long run",
        "",
        "`tests/e2e/test_same_story.py` compares 300 tokens in every test run; this is the long",
        "form, run by hand. Equal means `==` on token ids and on digests of the whole fp32 logits",
        "row of every token. The four requests of a chunk size run at once. The seconds are of a",
        "busy machine and say nothing about speed.",
        "",
        machine_facts.markdown()
        + f"- Model {alone[0].model}, numeric class {alone[0].numeric_class}",
        *(
            f"- SHA-256 over the logits digests of the {story} story alone: "
            f"`{hashlib.sha256(b''.join(answer.logits_digests)).hexdigest()}`"
            for story, answer in zip(("greedy", "seeded"), alone, strict=True)
        ),
        "",
        "| story | how | tokens | equal ids | equal logits rows | seconds of the batch |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each.story} | {each.how} | {each.num_tokens} | {each.num_equal_ids} "
            f"| {each.num_equal_digests} | {each.seconds:.0f} |"
            for each in found
        ),
        "",
        f"{sum(each.is_equal for each in found)} of {len(found)} comparisons are equal whole.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, write both files; the exit status is 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/same_story.md"))
    args = parser.parse_args()
    # One event loop for all: gRPC's poller goes on to call loops that are closed.
    with running_pair(embedded_model_path()) as pair, asyncio.Runner() as runner:
        alone, found = tell(runner, pair, args.tokens)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(markdown(alone, found))
    document = {
        "command": machine_facts.command(),
        "machine": machine_facts.machine(),
        "numeric_class": alone[0].numeric_class,
        "comparisons": [
            {name: getattr(each, name) for name in Comparison.__slots__} for each in found
        ],
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(each.is_equal for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
