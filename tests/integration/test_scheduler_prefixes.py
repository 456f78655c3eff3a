"""Openings and cached prefixes across the whole scheduler, over an executor that shares them."""

import asyncio
from typing import Any

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import RequestId
from tests.support.fake_executor import DropSession, FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running, until

STOPPING = sampling_pb2.StoppingParams(max_tokens=8, ignore_eos=True)
PROMPT = list(range(5, 25)) * 2  # two blocks and a half


async def _complete(harness: Harness, prompt: list[int], **fields: Any) -> Output:
    ids = pb.TokenIds(ids=prompt)
    return await harness.complete(token_ids=ids, stopping=STOPPING, **fields)


def _num_computed(executor: FakeExecutor) -> int:
    return sum(len(step.token_ids) // 4 for step in executor.steps)


async def test_a_repeated_prompt_is_taken_from_the_cache_with_equal_tokens() -> None:
    async with running(FakeExecutor()) as harness:
        cold = await _complete(harness, PROMPT)
        num_cold = _num_computed(harness.executor)
        warm = await _complete(harness, PROMPT)
        assert warm.token_ids == cold.token_ids
        assert cold.finished.usage.num_cached_tokens == 0
        assert warm.finished.usage.num_cached_tokens == 32
        assert _num_computed(harness.executor) - num_cold == num_cold - 32
        assert harness.metric("prompt_tokens_total", source="prefix_memory") == 32
        assert harness.metric("prompt_tokens_total", source="computed") == 40 + 8
        await harness.wait_idle()


async def test_equal_prompts_that_arrive_together_compute_their_start_once() -> None:
    executor = FakeExecutor(max_num_batched_tokens=16)
    async with running(executor) as harness:
        outputs = await asyncio.gather(*(_complete(harness, PROMPT) for _ in range(5)))
        assert len({tuple(each.token_ids) for each in outputs}) == 1
        cached = sorted(each.finished.usage.num_cached_tokens for each in outputs)
        assert cached == [0, 32, 32, 32, 32]
        await harness.wait_idle()


async def test_an_executor_that_shares_nothing_serves_equal_prompts() -> None:
    executor = FakeExecutor(prefix_cache=False, max_num_batched_tokens=16)
    async with running(executor) as harness:
        outputs = await asyncio.gather(*(_complete(harness, PROMPT) for _ in range(5)))
        assert len({tuple(each.token_ids) for each in outputs}) == 1
        assert harness.metric("prompt_tokens_total", source="prefix_memory") == 0
        await harness.wait_idle()


async def test_a_lost_answer_to_an_open_is_asked_for_again() -> None:
    executor = FakeExecutor()
    lost: list[token_rows_pb2.OpenSequences] = []

    async def drop(message: token_rows_pb2.OpenSequences) -> None:
        if not lost:
            lost.append(message)
            raise DropSession

    executor.after_open = drop
    async with running(executor) as harness:
        first = await _complete(harness, PROMPT)
        assert harness.metric("executor_reconnects_total", reason="resumed") == 1
        assert executor.openings == [lost[0], lost[0]]
        assert executor.computed_step_ids[0] == 1
        await harness.wait_idle()
        assert (await _complete(harness, PROMPT)).token_ids == first.token_ids


async def test_a_cancel_while_it_is_opened_gives_the_sequence_back() -> None:
    executor = FakeExecutor()
    async with running(executor) as harness:

        async def cancel(message: token_rows_pb2.OpenSequences) -> None:
            executor.after_open = None
            assert harness.server.engine.cancel(RequestId("a"))

        executor.after_open = cancel
        output = await _complete(harness, PROMPT, request_id="a")
        assert output.finished.reason == sampling_pb2.FINISH_REASON_CANCELLED

        async def is_given_back() -> bool:
            return not executor.sequences

        await until(is_given_back)
        assert (
            await _complete(harness, PROMPT)
        ).finished.reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_restart_while_it_is_opened_computes_everything() -> None:
    executor = FakeExecutor()
    async with running(executor) as harness:
        expected = await _complete(harness, PROMPT)

        async def restart(message: token_rows_pb2.OpenSequences) -> None:
            executor.after_open = None
            executor.restart()
            raise DropSession

        executor.after_open = restart
        output = await _complete(harness, PROMPT)
        assert output.token_ids == expected.token_ids
        assert output.finished.usage.num_cached_tokens == 0
        assert harness.metric("executor_reconnects_total", reason="restarted") == 1
        await harness.wait_idle()
