"""Same prompt, same story: a request's tokens and logits do not depend on its batch or its chunks.

Every comparison is between whole fp32 logits rows, through the digests that the executor takes of
their bytes, and between token ids; it is equality. `long_story.py` is the long form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler_service.client import AsyncClient, Completion, GenerationParams
from tests.support.embedded_model import embedded_model_path
from tests.support.services import ServicePair, running_pair

NUM_TOKENS = 300
NUM_OTHERS = 16
LONG_PROMPT = "The lighthouse stood at the end of a long stone pier, and every evening " * 8

GREEDY = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, return_logits_digests=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
TRUNCATED = replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, seed=11)
CASES = {"greedy": GREEDY, "seeded": SEEDED, "truncated": TRUNCATED}


@pytest.fixture(scope="module")
def pair() -> Iterator[ServicePair]:
    with running_pair(embedded_model_path()) as running:
        yield running


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    # One event loop for all: gRPC's poller goes on to call loops that are closed.
    with asyncio.Runner() as one:
        yield one


async def _complete(client: AsyncClient, prompt: str, params: GenerationParams) -> Completion:
    async with await client.generate(prompt, params) as stream:
        return await stream.completion()


async def _ask(
    pair: ServicePair, params: GenerationParams, prompt: str = LONG_PROMPT
) -> Completion:
    """Run one request on the scheduler that was started last."""
    async with AsyncClient(pair.schedulers[-1].address) as client:
        return await _complete(client, prompt, params)


async def _among_others(address: str) -> dict[str, Completion]:
    """The three cases at once, with 16 others of mixed lengths that come and go meanwhile."""

    async def other(client: AsyncClient, index: int) -> None:
        await asyncio.sleep(0.25 * index)
        prompt = f"Story number {index}: " + "once upon a time " * (1 + 4 * (index % 5))
        noise = GenerationParams(
            max_tokens=6 + 3 * index, temperature=0.7 * (index % 3), seed=index, ignore_eos=True
        )
        await _complete(client, prompt, noise)

    async with AsyncClient(address) as client:
        others = [asyncio.create_task(other(client, index)) for index in range(NUM_OTHERS)]
        await asyncio.sleep(0.12)
        answers = await asyncio.gather(
            *(_complete(client, LONG_PROMPT, params) for params in CASES.values())
        )
        await asyncio.gather(*others)
    return dict(zip(CASES, answers, strict=True))


# One test, so that parallel workers do not each start all of it. Chunks of 512 are the default, and
# longer than the prompt.
@pytest.mark.timeout(300)
def test_alone_with_any_chunk_equals_among_sixteen_others(
    runner: asyncio.Runner, pair: ServicePair
) -> None:
    together = runner.run(_among_others(pair.schedulers[0].address))
    for chunk, case in ((512, "greedy"), (64, "greedy"), (7, "seeded"), (1, "truncated")):
        # It replaces the session of the last one.
        scheduler = pair.start_scheduler("--max-prefill-chunk", str(chunk))
        # With a salt of its own, so that all of its prompt is computed.
        alone = runner.run(_ask(pair, replace(CASES[case], cache_salt=f"chunks of {chunk}")))
        scheduler.stop()
        wanted = together[case]
        assert len(wanted.logits_digests) == len(wanted.token_ids) == NUM_TOKENS
        assert all(any(digest) for digest in wanted.logits_digests)
        assert alone.token_ids == wanted.token_ids, (chunk, case)
        assert alone.logits_digests == wanted.logits_digests, (chunk, case)
        assert alone.text == wanted.text, (chunk, case)


def test_digests_tell_prompts_apart(runner: asyncio.Runner, pair: ServicePair) -> None:
    """The digest is of real logits: another prompt gives another one."""
    pair.start_scheduler()
    one_token = replace(GREEDY, max_tokens=1)
    first, again, other = (
        runner.run(_ask(pair, one_token, prompt)).logits_digests[0]
        for prompt in ("The sea is", "The sea is", "The sea was")
    )
    assert first == again
    assert first != other
