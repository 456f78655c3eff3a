"""Same prompt, same story: a request's tokens and logits do not depend on its batch or its chunks.

Every comparison is between whole fp32 logits rows, through the digests that the executor takes of
their bytes, and between token ids; it is equality.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler_service.client import AsyncClient, Completion, GenerationParams
from tests.support.embedded_model import embedded_model_path
from tests.support.services import ServicePair, running_pair

# 300 in CI; the long run is written down in docs/evidence.md.
NUM_TOKENS = int(os.environ.get("ISOBATCH_SAME_STORY_TOKENS", "300"))
LONG_PROMPT = "The lighthouse stood at the end of a long stone pier, and every evening " * 8

GREEDY = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, return_logits_digests=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
TRUNCATED = replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, seed=11)
CASES = {"greedy": GREEDY, "seeded": SEEDED, "truncated": TRUNCATED}


@pytest.fixture(scope="module")
def pair() -> Iterator[ServicePair]:
    with running_pair(embedded_model_path()) as running:
        yield running


async def _ask(client: AsyncClient, prompt: str, params: GenerationParams) -> Completion:
    async with await client.generate(prompt, params) as stream:
        return await stream.completion()


async def _solo(address: str, params: GenerationParams) -> Completion:
    async with AsyncClient(address) as client:
        return await _ask(client, LONG_PROMPT, params)


async def _among_others(address: str, params: GenerationParams) -> Completion:
    """The same request while 16 others of mixed lengths start before and after it."""

    async def other(client: AsyncClient, index: int) -> Completion:
        await asyncio.sleep(0.05 * (index % 8))
        prompt = f"Story number {index}: " + "once upon a time " * (1 + 7 * (index % 5))
        noise = GenerationParams(
            max_tokens=20 + 11 * index, temperature=0.7 * (index % 3), seed=index, ignore_eos=True
        )
        return await _ask(client, prompt, noise)

    async with AsyncClient(address) as client:
        others = [asyncio.create_task(other(client, index)) for index in range(16)]
        await asyncio.sleep(0.12)
        answer = await _ask(client, LONG_PROMPT, params)
        await asyncio.gather(*others)
    return answer


def _check_equal(got: Completion, wanted: Completion) -> None:
    assert len(wanted.logits_digests) == len(wanted.token_ids) == NUM_TOKENS
    assert all(any(digest) for digest in wanted.logits_digests)
    assert got.token_ids == wanted.token_ids
    assert got.logits_digests == wanted.logits_digests
    assert got.text == wanted.text


@pytest.mark.parametrize("name", CASES)
def test_request_alone_equals_request_among_sixteen_others(pair: ServicePair, name: str) -> None:
    address = pair.schedulers[0].address
    alone = asyncio.run(_solo(address, CASES[name]))
    _check_equal(asyncio.run(_among_others(address, CASES[name])), alone)


def test_prefill_chunks_do_not_change_a_bit(pair: ServicePair) -> None:
    """Chunks of 1, 7, 64 and 512 tokens; each scheduler replaces the session of the last."""
    answers = []
    for chunk in (512, 64, 7, 1):
        scheduler = pair.start_scheduler("--max-prefill-chunk", str(chunk))
        answers.append(asyncio.run(_solo(scheduler.address, GREEDY)))
        scheduler.stop()
    for answer in answers[1:]:
        _check_equal(answer, answers[0])


def test_digests_tell_prompts_apart(pair: ServicePair) -> None:
    """The digest is of real logits: another prompt gives another one."""

    scheduler = pair.start_scheduler()

    async def first_digest(prompt: str) -> bytes:
        async with AsyncClient(scheduler.address) as client:
            answer = await _ask(client, prompt, replace(GREEDY, max_tokens=1))
        return answer.logits_digests[0]

    one = asyncio.run(first_digest("The sea is"))
    assert one == asyncio.run(first_digest("The sea is"))
    assert one != asyncio.run(first_digest("The sea was"))
