"""Speculation by a draft model through the whole scheduler: only the number of steps changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from scheduler_service.speculation import Speculator
from scheduler_service.speculation.draft_model import WINDOW
from tests.integration.test_scheduler_speculation import (
    MODEL,
    NUM_TOKENS,
    PARAMS,
    PROMPTS,
    V,
    digests_of,
    fields_of,
    solo,
)
from tests.support.fake_answers import array
from tests.support.fake_drafter import BEHIND, FAILED, NO_CAPACITY, FakeDrafter
from tests.support.fake_executor import DropSession, FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running
from tests.support.toy_model import ToyModel

# What a step of the toy target and a pass of its draft model are said to cost.
TARGET_CURVE = tuple((n, n, 0, 1_000_000 + 50_000 * n) for n in (1, 2, 4, 8, 16, 64))
DRAFT_CURVE = tuple((n, n, 10_000 + 1_000 * n) for n in (1, 2, 8, 64))


def drafting(**changes: Any) -> FakeExecutor:
    """An executor whose draft model is the target itself."""
    return FakeExecutor(
        drafter=FakeDrafter(MODEL, cost_points=DRAFT_CURVE, **changes),
        cost_points=TARGET_CURVE, max_top_k=4,
    )  # fmt: skip


def drafter_of(harness: Harness) -> FakeDrafter:
    """The draft model of the fake executor."""
    drafter = harness.executor.drafter
    assert drafter is not None
    return drafter


async def ask(harness: Harness, prompts: list[tuple[int, ...]], params: SamplingParams,
              **changes: Any) -> list[Output]:  # fmt: skip
    """Ask for all prompts at once."""
    return await asyncio.gather(
        *(harness.complete(**{**fields_of(prompt, params), **changes}) for prompt in prompts)
    )


def check(prompts: list[tuple[int, ...]], found: list[Output], params: SamplingParams) -> None:
    """Tokens and digests of logits are those of plain decoding."""
    for prompt, output in zip(prompts, found, strict=True):
        wanted = solo(prompt, params)
        assert output.token_ids == wanted
        assert output.digests == digests_of(prompt, wanted)


def counts(outputs: list[Output]) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each."""
    usages = [output.finished.usage for output in outputs]
    return [(each.num_draft_tokens, each.num_accepted_draft_tokens) for each in usages]


@pytest.mark.parametrize(("name", "k"), [("greedy", 8), ("free", 1), ("free", 4), ("wide", 3)])
async def test_tokens_and_logits_are_those_of_plain_decoding(name: str, k: int) -> None:
    """Right and wrong drafts, alone and with seven others, k as fixed."""
    params = PARAMS[name]
    async with running(drafting(noise=0.2), speculation="draft", fixed_draft_tokens=k) as harness:
        for prompts in (PROMPTS[:1], PROMPTS):
            found = await ask(harness, prompts, params)
            check(prompts, found, params)
            assert all(drafted for drafted, _ in counts(found))
        await harness.wait_idle()
        assert not drafter_of(harness).known


async def test_a_draft_model_that_is_the_target_is_always_right_when_greedy() -> None:
    async with running(drafting(), speculation="draft", fixed_draft_tokens=4) as harness:
        found = await ask(harness, PROMPTS, PARAMS["greedy"])
        check(PROMPTS, found, PARAMS["greedy"])
        # The prompt's own step gives a token, then three times five; the last row is cut.
        assert counts(found) == [(10, 10)] * len(PROMPTS)
        first = {"proposer": "draft", "position": "1"}
        assert harness.metric("draft_tokens_total", **first) > 0
        assert harness.metric("draft_tokens_total", proposer="lookup", position="1") == 0
        # One request to the draft model a step, for all sequences that are ready.
        assert len(drafter_of(harness).requests) <= len(harness.executor.steps)


async def test_acceptance_at_a_fixed_number_is_the_same_alone_and_batched() -> None:
    """The article's own test."""
    params = PARAMS["greedy"]
    other = ToyModel(V, b"other")
    bias = sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(40, 43), 14.0))

    class Biased(ToyModel):
        """Knows of the bias, and is another model all the same."""

        def logits(self, token_ids: Any) -> Any:
            logits = other.logits(token_ids)
            logits[40:43] += 14
            return logits

    executor = drafting()
    assert executor.drafter is not None
    executor.drafter.model = Biased(V)
    async with running(executor, speculation="draft", fixed_draft_tokens=3) as harness:
        alone = [(await ask(harness, [prompt], params, sampling=bias))[0] for prompt in PROMPTS]
        together = await ask(harness, PROMPTS, params, sampling=bias)
    assert counts(alone) == counts(together)
    assert 0 < sum(right for _, right in counts(alone)) < sum(all_ for all_, _ in counts(alone))


@pytest.mark.parametrize("kind", ["draft", "auto"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
async def test_whatever_the_controller_makes_of_it_tokens_are_the_same(
    kind: str, noise: float
) -> None:
    """How much is drafted depends on measured times, and nothing else does."""
    async with running(drafting(noise=noise), speculation=kind) as harness:
        found = await ask(harness, PROMPTS, PARAMS["free"])
        check(PROMPTS, found, PARAMS["free"])
        off = await ask(harness, PROMPTS, PARAMS["free"], disable_speculation=True)
        check(PROMPTS, off, PARAMS["free"])
        assert counts(off) == [(0, 0)] * len(PROMPTS)


async def test_of_a_long_prompt_the_draft_model_reads_the_end_alone() -> None:
    """No request costs more than that; to the draft model a sequence begins there."""
    prompt = tuple(3 + i % 50 for i in range(150))
    async with running(drafting(), speculation="draft", fixed_draft_tokens=3) as harness:
        (found,) = await ask(harness, [prompt], PARAMS["greedy"])
        check([prompt], [found], PARAMS["greedy"])
        requests = drafter_of(harness).requests
        tokens = [len(each.token_ids) // 4 for each in requests]
        assert tokens[0] == WINDOW
        assert max(tokens[1:]) <= 4
        assert array(requests[0].token_ids, "<i4")[: WINDOW - 1] == list(prompt[1 - WINDOW :])
        assert array(requests[0].row_start_positions, "<i4") == [0]
        assert array(requests[1].row_start_positions, "<i4") == [WINDOW]


async def test_a_draft_model_with_few_positions_begins_anew() -> None:
    params = PARAMS["greedy"]
    async with running(
        drafting(context_length=20), speculation="draft", fixed_draft_tokens=3
    ) as harness:
        check(PROMPTS, await ask(harness, PROMPTS, params), params)
        for request in drafter_of(harness).requests:
            starts = array(request.row_start_positions, "<i4")
            lengths = array(request.row_num_tokens, "<i4")
            assert max(map(sum, zip(starts, lengths, strict=True))) <= 20


@pytest.mark.parametrize("end", [BEHIND, NO_CAPACITY, FAILED])
async def test_troubles_of_the_draft_model_are_nobodys(end: int) -> None:
    """It forgets, has no room, or gives up: texts are the same, and others are drafted for."""
    params = PARAMS["free"]
    executor = drafting(noise=0.3, force=lambda number, sequence: end if number % 3 == 0 else None)
    async with running(executor, speculation="draft", fixed_draft_tokens=3) as harness:
        found = await ask(harness, PROMPTS, params)
        check(PROMPTS, found, params)
        assert sum(drafted for drafted, _ in counts(found)) > 0
        await harness.wait_idle()


async def test_a_sequence_that_failed_is_not_asked_for_again() -> None:
    executor = drafting(force=lambda number, sequence: FAILED)
    async with running(executor, speculation="draft", fixed_draft_tokens=3) as harness:
        check(PROMPTS[:1], await ask(harness, PROMPTS[:1], PARAMS["greedy"]), PARAMS["greedy"])
        assert len(drafter_of(harness).requests) == 1


async def test_preemption_cancel_and_stop_strings_change_nothing() -> None:
    params = PARAMS["free"]
    executor = FakeExecutor(
        num_blocks=9, block_size=8, drafter=FakeDrafter(MODEL, noise=0.2), cost_points=TARGET_CURVE
    )
    async with running(executor, speculation="draft", fixed_draft_tokens=4) as harness:
        gone = harness.generate(**fields_of((5, 6, 7, 8), params))
        found = await ask(harness, PROMPTS, params)
        gone.cancel()
        check(PROMPTS, found, params)
        assert any(output.finished.num_preemptions for output in found)
        plain = (await ask(harness, PROMPTS[:1], params, disable_speculation=True))[0]
        stopping = sampling_pb2.StoppingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, stop=[plain.text[5:7]]
        )
        off = await ask(harness, PROMPTS[:1], params, stopping=stopping, disable_speculation=True)
        on = await ask(harness, PROMPTS[:1], params, stopping=stopping)
        assert (on[0].text, on[0].token_ids) == (off[0].text, off[0].token_ids)
        await harness.wait_idle()


@pytest.mark.parametrize("how", ["restart", "drop"])
async def test_a_new_executor_and_a_resumed_session_change_nothing(how: str) -> None:
    params = PARAMS["free"]
    executor = drafting(noise=0.2)
    happened = 0

    async def trouble(step: Any) -> None:
        nonlocal happened
        if step.step_id == 3 and happened < 2:
            happened += 1
            if how == "drop":
                raise DropSession
            executor.restart()

    executor.after_step = trouble
    async with running(executor, speculation="draft", fixed_draft_tokens=3) as harness:
        found = await ask(harness, PROMPTS[:3], params)
        check(PROMPTS[:3], found, params)
        assert happened
        assert sum(accepted for _, accepted in counts(found)) > 0


async def test_an_answer_that_breaks_the_contract_ends_no_request() -> None:
    """The session is begun anew, as after any such answer; requests are computed again."""
    executor = drafting()
    drafter = executor.drafter
    assert drafter is not None
    answer, wrong = drafter.answer, 0

    def broken(request: Any) -> Any:
        nonlocal wrong
        reply = answer(request)
        if wrong < 1:
            wrong += 1
            reply.token_ids = reply.token_ids[:-2]
        return reply

    drafter_type = type("Broken", (FakeDrafter,), {"answer": lambda self, request: broken(request)})
    executor.drafter = drafter_type(MODEL, cost_points=DRAFT_CURVE)
    async with running(executor, speculation="draft", fixed_draft_tokens=3) as harness:
        check(PROMPTS[:1], await ask(harness, PROMPTS[:1], PARAMS["greedy"]), PARAMS["greedy"])
        assert wrong == 1


async def test_without_a_draft_model_auto_is_lookup_and_draft_is_nothing() -> None:
    for kind, expected in (("auto", True), ("draft", False)):
        async with running(FakeExecutor(), speculation=kind) as harness:
            served = harness.server.engine.served
            assert served is not None
            assert isinstance(served.loop.speculator, Speculator) is expected
            check(PROMPTS[:1], await ask(harness, PROMPTS[:1], PARAMS["greedy"]), PARAMS["greedy"])


async def test_auto_takes_a_lookup_where_there_is_one_and_else_the_draft_model() -> None:
    """A text that repeats itself needs no draft model; another text does."""
    bias = sampling_pb2.SamplingParams(logit_bias={70: 100.0})

    def drafted(harness: Harness, proposer: str) -> float:
        return harness.metric("draft_tokens_total", proposer=proposer, position="1")

    async with running(drafting(), speculation="auto", fixed_draft_tokens=2) as harness:
        await ask(harness, PROMPTS[:1], PARAMS["greedy"], sampling=bias)
        assert drafted(harness, "lookup") >= 3
        assert drafted(harness, "draft") <= 2
        before = drafted(harness, "draft")
        await ask(harness, PROMPTS[:1], PARAMS["greedy"])
        assert drafted(harness, "draft") - before >= 3
        stats = await harness.stub.GetStats(pb.GetStatsRequest())
        assert stats.num_accepted_draft_tokens > 0


async def test_executors_that_come_back_with_and_without_a_draft_model() -> None:
    """Each time what is asked of it is what it has; requests go on, whoever drafts."""
    executor = FakeExecutor(cost_points=TARGET_CURVE, max_top_k=4)
    with_draft = drafting().drafter
    async with running(executor, speculation="auto", fixed_draft_tokens=3) as harness:
        for drafter in (None, with_draft, None, with_draft):
            if drafter is not executor.drafter:
                executor.drafter = drafter
                executor.restart()
            check(PROMPTS, await ask(harness, PROMPTS, PARAMS["free"]), PARAMS["free"])
            await harness.wait_idle()
        assert drafter_of(harness).requests
        # Nobody was asked for what it has not: that would have ended the session.
        assert harness.metric("executor_reconnects_total", reason="restarted") == 3
