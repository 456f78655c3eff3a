"""Speculation changes no token and no logit: the long form, by hand.

    .venv/bin/python tests/e2e/long_speculation.py --tokens 1000
    .venv/bin/python tests/e2e/long_speculation.py --draft-model smollm2-draft --speculation auto

Each request runs alone without speculation and then among all others with it. Equal means `==` on
token ids and on digests of the whole fp32 logits row of every token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, Completion, GenerationParams
from tests.bench.speculation_texts import KINDS, prompt
from tests.support.embedded_model import embedded_model_path
from tests.support.services import running_pair


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request with and without speculation."""

    name: str
    num_tokens: int
    num_drafted: int
    num_accepted: int
    is_equal: bool


def cases(num_tokens: int) -> dict[str, tuple[str, GenerationParams]]:
    """Return prompts and parameters by name: each kind of text, greedy and drawn."""
    greedy = GenerationParams(max_tokens=num_tokens, ignore_eos=True, return_logits_digests=True)
    drawn = replace(greedy, temperature=0.8, top_p=0.95, seed=5)
    return {
        f"{kind}, {how}": (prompt(kind, index), params)
        for index, kind in enumerate(KINDS)
        for how, params in (("greedy", greedy), ("drawn", drawn))
    }


async def compare(address: str, num_tokens: int) -> list[Comparison]:
    """Run all cases at the scheduler, which speculates."""

    async def one(client: AsyncClient, words: str, params: GenerationParams) -> Completion:
        async with await client.generate(words, params) as stream:
            return await stream.completion()

    todo = cases(num_tokens)
    async with AsyncClient(address) as client:
        alone = [
            await one(client, words, replace(params, disable_speculation=True))
            for words, params in todo.values()
        ]
        among = await asyncio.gather(
            *(one(client, words, params) for words, params in todo.values())
        )
    return [
        Comparison(
            name=name,
            num_tokens=len(wanted.token_ids),
            num_drafted=got.usage.num_draft_tokens,
            num_accepted=got.usage.num_accepted_draft_tokens,
            is_equal=(got.token_ids, got.text, got.logits_digests)
            == (wanted.token_ids, wanted.text, wanted.logits_digests)
            and len(wanted.logits_digests) == num_tokens,
        )
        for name, wanted, got in zip(todo, alone, among, strict=True)
    ]


def main() -> int:
    """Run and print a table; the exit status is 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--speculation", default="lookup", help="lookup, draft or auto")
    parser.add_argument("--draft-model", default="", help="alias or path, for draft and auto")
    parser.add_argument("--fixed", type=int, default=0, help="drafts of each row; 0: what pays")
    args = parser.parse_args()
    flags = ("--speculation", args.speculation, "--fixed-draft-tokens", str(args.fixed))
    draft = ("--draft-model", args.draft_model) if args.draft_model else ()
    with running_pair(embedded_model_path(), executor_flags=draft, scheduler_flags=flags) as pair:
        found = asyncio.run(compare(pair.schedulers[0].address, args.tokens))
    print("| request | tokens | drafted | accepted | equal |\n|---|---|---|---|---|")
    for each in found:
        print(
            f"| {each.name} | {each.num_tokens} | {each.num_drafted} | {each.num_accepted} "
            f"| {'yes' if each.is_equal else 'NO'} |"
        )
    return 0 if all(each.is_equal for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
