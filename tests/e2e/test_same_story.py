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
CASES = (GREEDY, SEEDED, TRUNCATED)


@pytest.fixture(scope="module")
def pair() -> Iterator[ServicePair]:
    with running_pair(embedded_model_path()) as running:
        yield running


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    # One event loop for all: gRPC's poller goes on to call loops that are closed.
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def alone(runner: asyncio.Runner, pair: ServicePair) -> list[Completion]:
    """The three cases, one after the other, with nothing else to do; chunks of 512 tokens."""
    return [runner.run(_ask(pair, params)) for params in CASES]


async def _complete(client: AsyncClient, prompt: str, params: GenerationParams) -> Completion:
    async with await client.generate(prompt, params) as stream:
        return await stream.completion()


async def _ask(
    pair: ServicePair, params: GenerationParams, prompt: str = LONG_PROMPT
) -> Completion:
    """Run one request on the scheduler that was started last."""
    async with AsyncClient(pair.schedulers[-1].address) as client:
        return await _complete(client, prompt, params)


async def _among_others(address: str) -> list[Completion]:
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
            *(_complete(client, LONG_PROMPT, params) for params in CASES)
        )
        await asyncio.gather(*others)
    return answers


def _check_equal(got: Completion, wanted: Completion) -> None:
    assert len(wanted.logits_digests) == len(wanted.token_ids) == NUM_TOKENS
    assert all(any(digest) for digest in wanted.logits_digests)
    assert got.token_ids == wanted.token_ids
    assert got.logits_digests == wanted.logits_digests
    assert got.text == wanted.text


def test_requests_alone_equal_requests_among_sixteen_others(
    runner: asyncio.Runner, pair: ServicePair, alone: list[Completion]
) -> None:
    together = runner.run(_among_others(pair.schedulers[0].address))
    for got, wanted in zip(together, alone, strict=True):
        _check_equal(got, wanted)


# The scheduler of `alone` has chunks of 512, more than the prompt. Each scheduler replaces the
# session of the last one.
@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_prefill_chunks_do_not_change_a_bit(
    runner: asyncio.Runner, pair: ServicePair, alone: list[Completion], chunk: int
) -> None:
    scheduler = pair.start_scheduler("--max-prefill-chunk", str(chunk))
    answer = runner.run(_ask(pair, GREEDY))
    scheduler.stop()
    _check_equal(answer, alone[0])


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
