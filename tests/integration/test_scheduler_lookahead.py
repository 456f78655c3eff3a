"""Steps sent before the answer to the one ahead of them: the same streams, whatever goes wrong."""

import asyncio
from typing import Any

import pytest

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from tests.support.fake_executor import DropSession, FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running, until
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

MODEL = ToyModel(vocab_size())
NUM_TOKENS = 24
OUTPUT = token_rows_pb2.TOKEN_SOURCE_STEP_OUTPUT


def _num_ahead(executor: FakeExecutor) -> int:
    """Steps with rows that name the step before."""
    return sum(OUTPUT in step.row_token_sources for step in executor.steps)


async def _complete(harness: Harness, first: int, **fields: Any) -> Output:
    sampling = fields.pop("sampling", {})
    return await harness.complete(
        token_ids=pb.TokenIds(ids=[first, 4, 5]),
        sampling=sampling_pb2.SamplingParams(seed=100 + first, **sampling),
        stopping=sampling_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        **fields,
    )


def _alone(first: int, **sampling: Any) -> list[int]:
    params = SamplingParams(seed=100 + first, **sampling)
    return MODEL.solo_run([first, 4, 5], params, NUM_TOKENS)


@pytest.mark.parametrize("lookahead", ["auto", "off"])
async def test_streams_are_those_of_a_run_alone(lookahead: str) -> None:
    """Greedy and drawn, and one among them whose token the executor cannot know."""
    async with running(lookahead=lookahead) as harness:
        plain: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}] * 2
        outputs = await asyncio.gather(
            *(_complete(harness, 10 + i, sampling=each) for i, each in enumerate(plain))
        )
        for index, (output, sampling) in enumerate(zip(outputs, plain, strict=True)):
            assert output.token_ids == _alone(10 + index, **sampling)
        num_ahead = _num_ahead(harness.executor)
        assert harness.metric("steps_ahead_total") == num_ahead
        assert (num_ahead > NUM_TOKENS // 2) is (lookahead == "auto")
        cut = {"temperature": 1.0, "top_k": 5}
        mixed = await asyncio.gather(
            _complete(harness, 20, sampling=cut), _complete(harness, 21, sampling=plain[1])
        )
        assert mixed[0].token_ids == _alone(20, **cut)
        assert mixed[1].token_ids == _alone(21, **plain[1])
        await harness.wait_idle()


@pytest.mark.parametrize(
    ("sampling", "settings"),
    [
        ({"temperature": 1.0, "top_k": 5}, {}),
        ({"temperature": 1.0, "top_p": 0.9}, {}),
        ({"temperature": 1.0, "min_p": 0.1}, {}),
        ({}, {"speculation": "lookup", "fixed_draft_tokens": 3}),
    ],
)
async def test_nothing_is_sent_ahead_of_tokens_that_the_executor_does_not_choose(
    sampling: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with running(**settings) as harness:
        output = await _complete(harness, 10, sampling=sampling)
        assert output.token_ids == _alone(10, **sampling)
        assert _num_ahead(harness.executor) == 0
        # Without drafts they may be.
        if settings:
            await _complete(harness, 11, disable_speculation=True)
            assert _num_ahead(harness.executor) > 0


async def test_where_nobody_has_drafted_for_a_while_steps_are_sent_ahead_again() -> None:
    """Beside a text without repetition; one that repeats itself is the same text as well."""
    bias = {"logit_bias": {70: 100.0}}
    async with running(speculation="lookup") as harness:
        assert (await _complete(harness, 10)).token_ids == _alone(10)
        assert _num_ahead(harness.executor) > 0
        repeated = await _complete(harness, 11, sampling=bias)
        assert repeated.token_ids == [70] * NUM_TOKENS


async def test_nothing_is_sent_ahead_to_an_executor_that_takes_one_step_at_a_time() -> None:
    async with running(FakeExecutor(max_steps_in_flight=0)) as harness:
        assert (await _complete(harness, 10)).token_ids == _alone(10)
        assert _num_ahead(harness.executor) == 0


async def test_rows_after_a_stop_are_counted_and_nobody_sees_them() -> None:
    """By a token that ends the text, and by a string; the length is known before."""
    async with running() as harness:
        alone = _alone(10)
        await _complete(harness, 10)
        assert harness.metric("vain_rows_total") == 0
        stopped = await harness.complete(
            token_ids=pb.TokenIds(ids=[10, 4, 5]),
            sampling=sampling_pb2.SamplingParams(seed=110),
            stopping=sampling_pb2.StoppingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[alone[7]]
            ),
        )
        end = alone.index(alone[7])
        assert stopped.token_ids in (alone[:end], alone[: end + 1])
        await harness.wait_idle()
        assert harness.metric("vain_rows_total") == 1
        text = (await _complete(harness, 10)).text
        cut = await harness.complete(
            token_ids=pb.TokenIds(ids=[10, 4, 5]),
            sampling=sampling_pb2.SamplingParams(seed=110),
            stopping=sampling_pb2.StoppingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, stop=[text[5:7]]
            ),
        )
        assert cut.text == text[: text.index(text[5:7])]
        await harness.wait_idle()
        assert 2 <= harness.metric("vain_rows_total") <= 3


@pytest.mark.parametrize("step_id", [2, 9, 10])
@pytest.mark.parametrize("when", ["before_step", "after_step"])
async def test_a_session_that_breaks_with_two_steps_under_way_goes_on(
    step_id: int, when: str
) -> None:
    executor = FakeExecutor()
    dropped: list[int] = []

    async def drop(step: token_rows_pb2.Step) -> None:
        if step.step_id == step_id and not dropped:
            dropped.append(step_id)
            raise DropSession

    setattr(executor, when, drop)
    async with running(executor) as harness:
        outputs = await asyncio.gather(*(_complete(harness, first) for first in (10, 11, 12)))
        assert [each.token_ids for each in outputs] == [_alone(first) for first in (10, 11, 12)]
        assert dropped
        assert harness.metric("executor_reconnects_total", reason="resumed") == 1
        computed = executor.computed_step_ids
        assert computed == list(range(1, len(computed) + 1))
        await harness.wait_idle()


@pytest.mark.parametrize("step_id", [2, 9, 10])
async def test_an_executor_that_restarts_with_two_steps_under_way_recomputes(step_id: int) -> None:
    executor = FakeExecutor()
    restarted: list[int] = []

    async def restart(step: token_rows_pb2.Step) -> None:
        if step.step_id == step_id and not restarted:
            restarted.append(step_id)
            executor.restart()
            raise DropSession

    executor.before_step = restart
    async with running(executor) as harness:
        outputs = await asyncio.gather(*(_complete(harness, first) for first in (10, 11, 12)))
        assert [each.token_ids for each in outputs] == [_alone(first) for first in (10, 11, 12)]
        assert restarted
        await harness.wait_idle()


async def test_a_step_refused_for_want_of_blocks_takes_the_one_behind_it_along() -> None:
    executor = FakeExecutor(block_size=4, num_blocks=64)

    async def shrink(step: token_rows_pb2.Step) -> None:
        # The scheduler was told of more.
        executor.num_blocks = 12 if step.step_id > 5 else 64

    executor.before_step = shrink
    async with running(executor) as harness:
        outputs = await asyncio.gather(*(_complete(harness, first) for first in (10, 11, 12)))
        assert [each.token_ids for each in outputs] == [_alone(first) for first in (10, 11, 12)]
        assert executor.num_refusals > 0
        assert _num_ahead(executor) > 0
        await harness.wait_idle()


async def test_a_poisoned_row_ends_its_request_alone() -> None:
    executor = FakeExecutor(poison_token=_alone(10)[6])
    async with running(executor) as harness:
        results = await asyncio.gather(
            _complete(harness, 10), _complete(harness, 11), return_exceptions=True
        )
        assert isinstance(results[0], Exception)
        if executor.poison_token not in _alone(11):
            assert isinstance(results[1], Output)
            assert results[1].token_ids == _alone(11)
        await harness.wait_idle()


async def test_a_newcomer_changes_no_token() -> None:
    async with running(FakeExecutor(step_seconds=0.001)) as harness:
        first = asyncio.ensure_future(_complete(harness, 10, sampling={"temperature": 1.0}))
        second = asyncio.ensure_future(_complete(harness, 11))

        async def is_under_way() -> bool:
            return len(harness.executor.computed_step_ids) > 5

        await until(is_under_way)
        late = await _complete(harness, 12)
        assert late.token_ids == _alone(12)
        assert (await first).token_ids == _alone(10, temperature=1.0)
        assert (await second).token_ids == _alone(11)
        await harness.wait_idle()
