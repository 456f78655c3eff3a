"""What a draft file is worth: acceptance by kind of text, its size, and its time beside its target.

    python -m training.evaluate --draft smollm2-draft.Q4_1.gguf --json evaluation.json

The target's texts are those of a running pair of services: prompts of the benchmark, which nothing
was trained on, greedy and drawn. The draft reads each text once in the executor's own kernels, and
where its most likely token is the text's next one, a verifier would have accepted it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from executor_service.models.load import LoadedModel, load_model
from executor_service.models.registry import DEFAULT_MODEL, locate
from isobatch_kernels.dispatch import create_backend
from isobatch_kernels.step import Backend, Stat, StepInput
from scheduler_service.client import AsyncClient, ChatMessage, GenerationParams
from tests.bench.speculation_texts import KINDS, prompt
from tests.support.services import running_pair
from training.acceptance import simulated

NUM_BLOCKS: Final = 128
BLOCK_SIZE: Final = 16
MAX_TOKENS: Final = 512
DRAFTS: Final = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target wrote."""

    kind: str
    temperature: float
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


async def written(
    address: str, temperatures: list[float], num_users: int, num_tokens: int
) -> list[Text]:
    """Return the target's texts, eight at a time."""
    gate = asyncio.Semaphore(8)

    async with AsyncClient(address) as client:

        async def one(kind: str, user: int, temperature: float) -> Text:
            words = prompt(kind, user)
            asked: str | tuple[ChatMessage, ...] = (
                words if kind == "code edit" else (ChatMessage("user", words),)
            )
            params = GenerationParams(max_tokens=num_tokens, temperature=temperature, seed=user)
            async with gate:
                ids = (await client.tokenize(asked)).token_ids
                async with await client.generate(asked, params) as stream:
                    answer = await stream.completion()
            return Text(kind, temperature, ids, answer.token_ids)

        return await asyncio.gather(
            *(
                one(kind, user, temperature)
                for kind in KINDS
                for temperature in temperatures
                for user in range(num_users)
            )
        )


def backend_of(model: LoadedModel) -> Backend:
    """Return this machine's CPU backend with room for one sequence."""
    return create_backend(
        model.program,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_TOKENS,
        backend="cpu",
    )


def likeliest(backend: Backend, ids: tuple[int, ...], start: int, num_wanted: int) -> list[int]:
    """Return the likeliest token after each of the last `num_wanted` of the given tokens.

    They stand at positions from `start` on, and those before are in the cache.
    """
    found: list[int] = []
    for begin in range(0, len(ids), MAX_TOKENS):
        part = np.asarray(ids[begin : begin + MAX_TOKENS], np.int32)
        first = max(0, len(ids) - num_wanted - begin)
        wanted = np.arange(first, len(part), dtype=np.int32)
        positions = np.arange(start + begin, start + begin + len(part), dtype=np.int32)
        step = StepInput(
            token_ids=part,
            positions=positions,
            query_start_loc=np.array([0, len(part)], np.int32),
            block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
            wanted=wanted,
            statistics=np.full(len(wanted), Stat.ARGMAX, np.uint32),
            top_k=np.zeros(len(wanted), np.int32),
            inverse_temperatures=np.ones(len(wanted), np.float32),
            quantiles=np.zeros(len(wanted), np.float32),
            edit_starts=np.zeros(len(wanted) + 1, np.int32),
            edit_ids=np.zeros(0, np.int32),
            edit_values=np.zeros(0, np.float32),
        )
        found += backend.run(step).argmax_ids.tolist()
    return found


def right(backend: Backend, text: Text, num_prompt_tokens: int) -> list[bool]:
    """Return for each written token whether the draft proposes it.

    Of the prompt it sees the last `num_prompt_tokens`.
    """
    ids = (*text.prompt_ids[-num_prompt_tokens:], *text.token_ids[:-1])
    best = likeliest(backend, ids, 0, len(text.token_ids))
    return [a == b for a, b in zip(best, text.token_ids, strict=True)]


def milliseconds(target: Backend, draft: Backend, rounds: int) -> dict[str, float]:
    """Time steps of one token at positions 200 to 299, in turns; return medians."""
    times: dict[str, list[float]] = {"target": [], "draft": []}
    for backend in (target, draft):
        likeliest(backend, tuple(range(1000, 1200)), 0, 1)
    for number in range(rounds):
        for name, backend in (("target", target), ("draft", draft)):
            for _ in range(4):  # the first ones find the other's weights in the caches
                began = time.perf_counter()
                likeliest(backend, (1000,), 200 + number % 100, 1)
                took = time.perf_counter() - began
            times[name].append(took * 1e3)
    return {name: statistics.median(values) for name, values in times.items()} | {
        f"{name}, least": min(values) for name, values in times.items()
    }


def rows(texts: list[Text], hits: list[list[bool]]) -> list[dict[str, object]]:
    """Return one report for each kind and temperature."""
    reports: list[dict[str, object]] = []
    for kind, temperature in dict.fromkeys((text.kind, text.temperature) for text in texts):
        mine = [
            hit
            for text, hit in zip(texts, hits, strict=True)
            if (text.kind, text.temperature) == (kind, temperature)
        ]
        found = {drafts: simulated(mine, drafts) for drafts in DRAFTS}
        reports.append(
            {
                "kind": kind,
                "temperature": temperature,
                "num_tokens": sum(map(len, mine)),
                "agreement": sum(map(sum, mine)) / max(1, sum(map(len, mine))),
                "accepted": {drafts: each.share for drafts, each in found.items()},
                "tokens_per_step": {drafts: each.tokens_per_step for drafts, each in found.items()},
                "totals": {drafts: asdict(each) for drafts, each in found.items()},
            }
        )
    return reports


def table(reports: list[dict[str, object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| text | temperature | right | accepted at k = 1 | 2 | 3 | 4 | tokens a step at k = 4 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        shares, steps = report["accepted"], report["tokens_per_step"]
        assert isinstance(shares, dict)
        assert isinstance(steps, dict)
        accepted = " | ".join(f"{shares[drafts]:.0%}" for drafts in DRAFTS)
        lines.append(
            f"| {report['kind']} | {report['temperature']} | {report['agreement']:.0%} "
            f"| {accepted} | {steps[DRAFTS[-1]]:.2f} |"
        )
    return lines


def main() -> None:
    """Parse flags, evaluate, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=NUM_BLOCKS * BLOCK_SIZE)
    parser.add_argument("--texts", help="where the target's texts are kept, or read if there")
    parser.add_argument("--json", default="bench-results/draft.json")
    args = parser.parse_args()
    kept = Path(args.texts) if args.texts else None
    if kept is not None and kept.is_file():
        texts = [
            Text(kind, heat, tuple(asked), tuple(answer))
            for kind, heat, asked, answer in json.loads(kept.read_text())
        ]
    else:
        heats = [float(each) for each in args.temperatures.split(",")]
        with running_pair(args.target) as pair:
            address = pair.schedulers[0].address
            texts = asyncio.run(written(address, heats, args.users, args.tokens))
        if kept is not None:
            lines = [
                (each.kind, each.temperature, each.prompt_ids, each.token_ids) for each in texts
            ]
            kept.write_text(json.dumps(lines))
    path = Path(args.draft)
    model = load_model(locate(args.draft))
    draft = backend_of(model)
    reports = rows(texts, [right(draft, text, args.prompt_tokens) for text in texts])
    times = milliseconds(backend_of(load_model(locate(args.target))), draft, args.rounds)
    print("\n".join(table(reports)))
    print(
        f"{model.num_parameters:,} parameters; a token takes {times['draft']:.2f} ms, "
        f"one of the target {times['target']:.2f} ms"
    )
    report = {
        "parameters": model.num_parameters,
        "bytes": path.stat().st_size if path.is_file() else None,
        "digest": model.weights_digest,
        "target": args.target,
        "prompt_tokens": args.prompt_tokens,
        "milliseconds": times,
        "acceptance": reports,
    }
    out = Path(args.json)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
