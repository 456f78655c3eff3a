"""Drafts accepted, serially and concurrently: the same texts with lookup drafts, two ways.

A draft is accepted while it equals the greedy token, so totals are a property of the text alone;
where they depend on company, company changed the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from scheduler_service.lab.article import Bench, Plans, Progress, start_sequence
from scheduler_service.lab.bench_executor import BenchExecutor, Row
from scheduler_service.speculation.lookup import LookupIndex

MOST_DRAFTS: Final = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Totals over all texts, one at a time and all at once, under one policy."""

    policy: str
    num_texts: int
    num_tokens: int  # of each
    proposed_alone: int
    accepted_alone: int
    proposed_together: int
    accepted_together: int
    texts_differ: int


@dataclass(slots=True)
class _Text:
    """A text in work: what is known of it, and how its drafts fared."""

    sequence_id: int
    tokens: list[int]  # generated
    index: LookupIndex = field(default_factory=LookupIndex)
    proposed: int = 0
    accepted: int = 0


def accepted_tokens(drafts: Sequence[int], greedy: Sequence[int]) -> list[int]:
    """Return what a verify row emits: the drafts that were right, and one token more.

    `greedy` has the model's token after the known ones and after each draft.
    """
    right = 0
    while right < len(drafts) and drafts[right] == greedy[right]:
        right += 1
    return list(greedy[: right + 1])


async def _speculate(
    bench: BenchExecutor, prompts: Sequence[Sequence[int]], count: int
) -> list[_Text]:
    """Generate `count` greedy tokens for each prompt, all together, with drafts by lookup."""
    texts = []
    for prompt in prompts:
        sequence, first = await start_sequence(bench, prompt)
        text = _Text(sequence, [first.token_id])
        text.index.extend([*prompt, first.token_id])
        texts.append(text)
    while unfinished := [each for each in texts if len(each.tokens) < count]:
        drafts = [
            tuple(each.index.propose(min(MOST_DRAFTS, count - len(each.tokens) - 1)).token_ids)
            for each in unfinished
        ]
        rows = [
            Row(text.sequence_id, (text.tokens[-1], *each), wants_all=True)
            for text, each in zip(unfinished, drafts, strict=True)
        ]
        step = await bench.step(rows, wants_digests=False)
        for text, each, outcomes in zip(unfinished, drafts, step.outcomes, strict=True):
            emitted = accepted_tokens(each, [outcome.token_id for outcome in outcomes])
            bench.rewind(text.sequence_id, len(each) + 1 - len(emitted))
            text.proposed += len(each)
            text.accepted += len(emitted) - 1
            text.tokens += emitted
            text.index.extend(emitted)
    for text in texts:
        bench.release(text.sequence_id)
    return texts


async def acceptance(
    benches: Bench, prompts: Sequence[Sequence[int]], plans: Plans, progress: Progress
) -> list[Acceptance]:
    """Generate all texts one at a time, then all at once, under each policy."""
    found = []
    for policy, bench in benches.items():
        progress(f"drafts accepted, policy {policy}")
        plan = plans.of(policy)
        texts = prompts[: plan.texts]
        alone: list[_Text] = []
        for prompt in texts:
            alone += await _speculate(bench, [prompt], plan.story_tokens)
        together = await _speculate(bench, texts, plan.story_tokens)
        found.append(
            Acceptance(
                policy=policy,
                num_texts=len(texts),
                num_tokens=plan.story_tokens,
                proposed_alone=sum(each.proposed for each in alone),
                accepted_alone=sum(each.accepted for each in alone),
                proposed_together=sum(each.proposed for each in together),
                accepted_together=sum(each.accepted for each in together),
                texts_differ=sum(
                    one.tokens != other.tokens for one, other in zip(alone, together, strict=True)
                ),
            )
        )
    return found
