"""Speculation through the whole scheduler: it changes the number of steps and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from scheduler_service.speculation import (
    AdaptiveController,
    Controller,
    FixedController,
    LookupProposer,
    Proposer,
    Speculator,
)
from tests.support.fake_executor import FakeExecutor, digest
from tests.support.proposers import OracleProposer, RandomProposer
from tests.support.scheduler_harness import Harness, Output, running
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

V = vocab_size()
MODEL = ToyModel(V)
NUM_TOKENS = 14
PROMPTS = [tuple(range(3 + i, 9 + 2 * i)) for i in range(8)]
# Greedy; drawn by quantile; and cut by top-p with too few entries to decide, so that full rows
# are fetched.
PARAMS = {
    "greedy": SamplingParams(),
    "free": SamplingParams(temperature=1.0, seed=5),
    "wide": SamplingParams(temperature=2.0, top_p=0.9, seed=6),
}


def fields_of(prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request."""
    return {
        "token_ids": pb.TokenIds(ids=prompt),
        "sampling": sampling_pb2.SamplingParams(
            temperature=params.temperature, top_p=params.top_p, seed=params.seed
        ),
        "stopping": sampling_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        "return_logits_digests": True,
    }


def solo(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """Return the tokens by definition."""
    return MODEL.solo_run(prompt, params, NUM_TOKENS)


def digests_of(prompt: tuple[int, ...], tokens: list[int]) -> list[bytes]:
    """Return the digests of the logits that gave the tokens."""
    known = [*prompt, *tokens]
    return [digest(MODEL.logits(known[: len(prompt) + i])) for i in range(len(tokens))]


def speculate(
    harness: Harness,
    proposer: Proposer | None = None,
    controller: Controller | None = None,
    max_draft_tokens: int = 8,
) -> Speculator:
    """Let the running scheduler speculate in this way."""
    served = harness.server.engine.served
    assert served is not None
    speculator = Speculator(
        proposer or LookupProposer(), controller or FixedController(max_draft_tokens),
        max_draft_tokens,
    )  # fmt: skip
    served.loop.speculator = speculator
    return speculator


def proposers(outputs: dict[tuple[int, ...], list[int]]) -> Iterator[Proposer]:
    """Return proposers from always right to never right."""
    for noise in (0.0, 0.3):
        yield OracleProposer(outputs, V, noise=noise)
    yield RandomProposer(V)


@pytest.mark.parametrize("name", PARAMS)
async def test_tokens_and_logits_are_those_of_plain_decoding(name: str) -> None:
    """Greedy and drawn, k from 1 to 8, alone and with seven others, whatever is proposed."""
    params = PARAMS[name]
    outputs = {prompt: solo(prompt, params) for prompt in PROMPTS}
    async with running(FakeExecutor(max_top_k=4)) as harness:
        ks = itertools.cycle([8, 1, 3, 5, 2, 4])
        for prompts in (PROMPTS[:1], PROMPTS):
            for proposer in proposers(outputs):
                speculate(harness, proposer, max_draft_tokens=next(ks))
                found = await asyncio.gather(
                    *(harness.complete(**fields_of(prompt, params)) for prompt in prompts)
                )
                for prompt, output in zip(prompts, found, strict=True):
                    assert output.token_ids == outputs[prompt]
                    assert output.digests == digests_of(prompt, outputs[prompt])
                    assert output.finished.usage.num_draft_tokens > 0
        assert (harness.executor.num_fetched_rows > 0) is (name == "wide")
        await harness.wait_idle()


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3, 4])
async def test_b14_what_is_cached_is_what_was_accepted(wrong_at: int | None) -> None:
    """Every row starts behind the tokens accepted so far: no refused draft stays in the cache."""
    prompt, params = PROMPTS[0], PARAMS["greedy"]
    truth = solo(prompt, params)
    async with running() as harness:
        speculate(
            harness, OracleProposer({prompt: truth}, V, wrong_at=wrong_at), max_draft_tokens=4
        )
        output = await harness.complete(**fields_of(prompt, params))
        assert output.token_ids == truth
        starts = [int(np.frombuffer(s.row_start_positions, "<i4")[0])
                  for s in harness.executor.steps if s.row_start_positions]  # fmt: skip
    num_accepted = 4 if wrong_at is None else min(wrong_at, 4)
    # The first step is the prompt; each later one begins at the last known token.
    expected = range(len(prompt), len(prompt) + NUM_TOKENS - 1, num_accepted + 1)
    assert starts == [0, *expected]
    usage = output.finished.usage
    assert usage.num_generated_tokens == NUM_TOKENS
    assert usage.num_accepted_draft_tokens == NUM_TOKENS - len(starts)


async def test_acceptance_at_a_fixed_number_is_the_same_alone_and_batched() -> None:
    """What a neighbour does changes no draw, so it changes no acceptance either."""
    params = PARAMS["free"]
    bias = sampling_pb2.SamplingParams(
        temperature=1.0, seed=5, logit_bias=dict.fromkeys(range(40, 43), 14.0)
    )
    async with running() as harness:

        async def one(prompt: tuple[int, ...]) -> tuple[int, int]:
            output = await harness.complete(**{**fields_of(prompt, params), "sampling": bias})
            usage = output.finished.usage
            return usage.num_draft_tokens, usage.num_accepted_draft_tokens

        speculate(harness, max_draft_tokens=3)
        alone = [await one(prompt) for prompt in PROMPTS]
        assert await asyncio.gather(*map(one, PROMPTS)) == alone
    assert 0 < sum(accepted for _, accepted in alone) < sum(drafted for drafted, _ in alone)


async def test_b23_a_stop_string_inside_accepted_tokens_ends_there() -> None:
    """Text, counts and reason are those without speculation, wherever the string lies."""
    prompt, params = PROMPTS[1], PARAMS["greedy"]
    truth = solo(prompt, params)
    async with running() as harness:
        plain = await harness.complete(**fields_of(prompt, params))
        found: list[tuple[Output, Output]] = []
        for start in range(2, 14, 4):
            stop = plain.text[start : start + 2]
            stopping = sampling_pb2.StoppingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop]
            )
            request = {**fields_of(prompt, params), "stopping": stopping}
            speculate(harness, OracleProposer({prompt: truth}, V))
            drafted = await harness.complete(**request)
            found.append((await harness.complete(**request, disable_speculation=True), drafted))
        await harness.wait_idle()
    for without, drafted in found:
        assert drafted.text == without.text
        assert drafted.token_ids == without.token_ids
        assert drafted.digests == without.digests
        assert drafted.finished.reason == without.finished.reason
        assert drafted.finished.stop_string == without.finished.stop_string
        assert without.finished.usage.num_draft_tokens == 0
    assert any(drafted.finished.usage.num_accepted_draft_tokens for _, drafted in found)


async def test_b32_exactly_as_many_tokens_as_asked_for_with_drafts() -> None:
    prompt, params = PROMPTS[2], PARAMS["greedy"]
    truth = solo(prompt, params)
    async with running() as harness:
        speculate(harness, OracleProposer({prompt: truth}, V), max_draft_tokens=5)
        for count in (1, 2, 3, 6, 7, 8):
            stopping = sampling_pb2.StoppingParams(max_tokens=count, ignore_eos=True)
            output = await harness.complete(**{**fields_of(prompt, params), "stopping": stopping})
            assert output.token_ids == truth[:count]
            assert output.finished.reason == sampling_pb2.FINISH_REASON_LENGTH
        stop = sampling_pb2.StoppingParams(
            max_tokens=NUM_TOKENS, stop_token_ids=[truth[4]], ignore_eos=True
        )
        output = await harness.complete(**{**fields_of(prompt, params), "stopping": stop})
        assert output.token_ids == truth[: truth.index(truth[4]) + 1]
        assert output.finished.stop_token_id == truth[4]


async def test_b22_every_parameter_holds_for_verified_tokens() -> None:
    """A bias, and cuts by top-k, top-p and min-p, decide at drafted positions as elsewhere."""
    sampling = sampling_pb2.SamplingParams(
        temperature=1.5, top_k=30, top_p=0.95, min_p=0.05, seed=9, logit_bias={50: 3.0, 60: -100.0}
    )
    async with running(FakeExecutor(max_top_k=8)) as harness:
        request = {**fields_of(PROMPTS[3], PARAMS["free"]), "sampling": sampling}
        plain = await harness.complete(**request)
        for noise in (0.0, 0.5):
            speculate(harness, OracleProposer({PROMPTS[3]: plain.token_ids}, V, noise=noise))
            output = await harness.complete(**request)
            assert output.token_ids == plain.token_ids
            assert output.digests == plain.digests
            assert output.finished.usage.num_accepted_draft_tokens > 0


async def test_a_pool_that_is_too_small_preempts_and_changes_nothing() -> None:
    params = PARAMS["free"]
    outputs = {prompt: solo(prompt, params) for prompt in PROMPTS}
    async with running(FakeExecutor(num_blocks=9, block_size=8)) as harness:
        speculate(harness, OracleProposer(outputs, V, noise=0.2))
        found = await asyncio.gather(
            *(harness.complete(**fields_of(prompt, params)) for prompt in PROMPTS)
        )
        assert [each.token_ids for each in found] == list(outputs.values())
        assert not harness.executor.num_refusals
        await harness.wait_idle()


async def test_an_executor_that_restarts_changes_nothing() -> None:
    params = PARAMS["free"]
    outputs = {prompt: solo(prompt, params) for prompt in PROMPTS[:3]}
    executor = FakeExecutor()

    async def restart(step: Any) -> None:
        if step.step_id == 4 and len(executor.computed_step_ids) < 8:
            executor.restart()

    executor.after_step = restart
    async with running(executor) as harness:
        speculate(harness, OracleProposer(outputs, V, noise=0.1), max_draft_tokens=3)
        found = await asyncio.gather(
            *(harness.complete(**fields_of(prompt, params)) for prompt in outputs)
        )
        assert [each.token_ids for each in found] == list(outputs.values())


async def test_a_draft_that_is_not_finite_ends_nobody() -> None:
    """Only what was drawn can end a request: a bad draft is computed again without."""
    prompt, params = PROMPTS[0], PARAMS["greedy"]
    truth = solo(prompt, params)
    poison = next(token for token in range(V) if token not in (*prompt, *truth))
    async with running(FakeExecutor(poison_token=poison)) as harness:
        spoilt = [*truth]
        spoilt[7] = poison
        speculate(harness, OracleProposer({prompt: spoilt}, V), max_draft_tokens=4)
        output = await harness.complete(**fields_of(prompt, params))
        assert output.token_ids == truth
        assert output.finished.num_preemptions == 1


async def test_counts_of_a_lookup_are_told_and_can_be_switched_off() -> None:
    """A text that repeats itself is drafted by lookup; the request may do without."""
    bias = sampling_pb2.SamplingParams(logit_bias={70: 100.0})
    async with running(speculation="lookup", fixed_draft_tokens=6) as harness:
        request = {**fields_of(PROMPTS[0], PARAMS["greedy"]), "sampling": bias}
        output = await harness.complete(**request)
        usage = output.finished.usage
        assert output.token_ids == [70] * NUM_TOKENS
        assert 0 < usage.num_accepted_draft_tokens <= usage.num_draft_tokens
        num_steps = harness.metric("step_phase_seconds_count", phase="forward")
        # One step more gives the sequence back.
        assert num_steps <= NUM_TOKENS - usage.num_accepted_draft_tokens + 1
        first = {"proposer": "lookup", "position": "1"}
        assert harness.metric("draft_tokens_total", **first) > 0
        assert harness.metric("accepted_draft_tokens_total", **first) > 0
        stats = await harness.stub.GetStats(pb.GetStatsRequest())
        assert stats.num_draft_tokens == usage.num_draft_tokens
        assert stats.num_accepted_draft_tokens == usage.num_accepted_draft_tokens
        off = await harness.complete(**request, disable_speculation=True)
        assert off.token_ids == output.token_ids
        assert off.digests == output.digests
        assert off.finished.usage.num_draft_tokens == 0


async def test_off_means_that_no_row_has_drafts() -> None:
    async with running(speculation="off") as harness:
        served = harness.server.engine.served
        assert served is not None
        assert served.loop.speculator is None
        output = await harness.complete(**fields_of(PROMPTS[0], PARAMS["greedy"]))
        assert output.finished.usage.num_draft_tokens == 0


async def test_nothing_is_kept_of_sequences_that_have_ended() -> None:
    async with running() as harness:
        lookup, controller = LookupProposer(), AdaptiveController()
        speculator = speculate(harness, lookup, controller)
        await asyncio.gather(
            *(harness.complete(**fields_of(prompt, PARAMS["greedy"])) for prompt in PROMPTS)
        )
        await harness.wait_idle()
        assert speculator.num_known == 0
        assert len(lookup) == len(controller) == 0
