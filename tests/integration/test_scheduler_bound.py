"""The bound on a step, from the executor's cost curve to the rows that reach it."""

import asyncio

import numpy as np

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

# A millisecond for the weights and a tenth of one for each token.
POINTS = tuple(
    (rows, tokens, 0, 1_000_000 + 100_000 * tokens)
    for rows, tokens in [(n, n) for n in (1, 2, 4, 8)] + [(1, n) for n in (16, 64, 256)]
)
MODEL = ToyModel(vocab_size())
LONG = [7 + index % 90 for index in range(400)]


async def _complete(harness: Harness, prompt: list[int], max_tokens: int) -> Output:
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    output = await harness.complete(token_ids=pb.TokenIds(ids=prompt), stopping=stopping)
    assert output.token_ids == MODEL.solo_run(prompt, SamplingParams(), max_tokens)
    return output


def _lengths(step: token_rows_pb2.Step) -> list[int]:
    lengths: list[int] = np.frombuffer(step.row_num_tokens, "<i4").tolist()
    return lengths


async def test_b38_a_long_prompt_goes_beside_streams_in_chunks_that_keep_the_bound() -> None:
    """And a short one after it has its first token long before the long one is read."""
    executor = FakeExecutor(cost_points=POINTS, max_num_batched_tokens=512)
    async with running(executor, max_step_ms=4.0) as harness:
        streams = [
            asyncio.ensure_future(_complete(harness, [10 + index, 4], 100)) for index in range(4)
        ]
        order: list[str] = []

        async def late(name: str, prompt: list[int]) -> None:
            await _complete(harness, prompt, 1)
            order.append(name)

        async def arrive(step: token_rows_pb2.Step) -> None:
            if step.step_id == 5:
                for name, prompt in (("long", LONG), ("short", [50, 51, 52, 53, 54])):
                    prompts.append(asyncio.ensure_future(late(name, prompt)))

        prompts: list[asyncio.Future[None]] = []
        executor.before_step = arrive
        await asyncio.gather(*streams)
        await asyncio.gather(*prompts)
        assert order == ["short", "long"]
        beside = [
            lengths
            for step in executor.steps
            if (lengths := _lengths(step)).count(1) == 4 and len(lengths) > 4
        ]
        # 4 ms less one for the weights: 30 tokens, of which 4 are the streams'.
        assert max(sum(lengths) for lengths in beside) == 30
        assert len(beside) >= 400 // 26
        assert harness.metric("step_bound_seconds") > 0
        assert harness.metric("step_predicted_seconds_total") > 0


async def test_another_executor_brings_another_curve() -> None:
    """Its capabilities are read anew with each session."""
    executor = FakeExecutor()
    async with running(executor, max_step_ms=4.0) as harness:
        served = harness.server.engine.served
        assert served is not None
        assert not served.loop.state.limits.cost_curve
        executor.cost_points = POINTS
        executor.restart()

        await _complete(harness, [9, 9], 5)
        assert len(served.loop.state.limits.cost_curve.points) == len(POINTS)
