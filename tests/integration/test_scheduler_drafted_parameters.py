"""Everything a request can ask for, and what can happen to it, while its tokens are drafted.

Each test runs by lookup and by a draft model, whose drafts are right often and not always, and
compares with plain decoding: tokens, text, digests of logits and how it ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running, until
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

PROMPTS = [tuple(range(3 + i, 12 + 2 * i)) for i in range(4)]
NUM_TOKENS = 18
# Few tokens come, so that a lookup finds pairs of them again.
BIAS = {40: 15.0, 41: 15.0, 42: 14.0}
KINDS = ["lookup", "draft"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.2, "seed": 7},
    "other seed": {"temperature": 1.2, "seed": 2**64 - 1},
    "top-k": {"temperature": 1.5, "seed": 8, "top_k": 3},
    "top-p": {"temperature": 1.5, "seed": 9, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "seed": 10, "min_p": 0.1},
    "all": {"temperature": 1.5, "seed": 11, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
}


class Biased(ToyModel):
    """The target as a draft model that knows of the bias."""

    def logits(self, token_ids: Any) -> Any:
        """Return the logits with the bias."""
        logits = super().logits(token_ids).copy()
        logits[list(BIAS)] += list(BIAS.values())
        return logits


def an_executor(**changes: Any) -> FakeExecutor:
    """An executor whose draft model is right often and not always."""
    drafter = FakeDrafter(Biased(vocab_size()), noise=0.3)
    return FakeExecutor(drafter=drafter, max_top_k=4, **changes)


def serving(kind: str, executor: FakeExecutor | None = None, **settings: Any) -> Any:
    """Run a scheduler that always tries three drafts of this kind."""
    executor = executor or an_executor()
    return running(executor, speculation=kind, fixed_draft_tokens=3, **settings)


def request(prompt: tuple[int, ...], sampling: dict[str, Any] | None = None,
            **stopping: Any) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a request."""
    return {
        "token_ids": pb.TokenIds(ids=prompt),
        "sampling": sampling_pb2.SamplingParams(logit_bias=BIAS, **(sampling or {})),
        "stopping": sampling_pb2.StoppingParams(
            **{"max_tokens": NUM_TOKENS, "ignore_eos": True, **stopping}
        ),
        "return_logits_digests": True,
    }


async def both(harness: Harness, requests: list[dict[str, Any]]) -> list[Output]:
    """Run requests at once and then each alone and plainly; check, and return the former."""
    drafted = await asyncio.gather(*(harness.complete(**each) for each in requests))
    for fields, found in zip(requests, drafted, strict=True):
        check(found, await harness.complete(**fields, disable_speculation=True))
    return drafted


def check(found: Output, plain: Output) -> None:
    """Nothing but counts of drafts differs."""
    assert found.token_ids == plain.token_ids
    assert found.text == plain.text
    assert found.digests == plain.digests
    assert found.finished.reason == plain.finished.reason
    assert found.finished.stop_string == plain.finished.stop_string
    assert found.finished.stop_token_id == plain.finished.stop_token_id
    assert plain.finished.usage.num_draft_tokens == 0


def num_accepted(outputs: list[Output]) -> int:
    """Return how many drafts were accepted."""
    return sum(each.finished.usage.num_accepted_draft_tokens for each in outputs)


def num_drafted(outputs: list[Output]) -> int:
    """Return how many drafts were tried."""
    return sum(each.finished.usage.num_draft_tokens for each in outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_every_parameter_of_sampling(kind: str, name: str) -> None:
    async with serving(kind) as harness:
        found = await both(harness, [request(each, SAMPLINGS[name]) for each in PROMPTS])
        assert 0 < num_accepted(found) < num_drafted(found)
        await harness.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_samples_of_a_prompt_are_drafted_for_each_of_them(kind: str) -> None:
    """Sample i is the answer of the seed plus i."""
    async with serving(kind) as harness:
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        accepted = 0
        fields = request(PROMPTS[0], {"temperature": 1.2, "seed": 30})
        async for event in harness.generate(**fields, num_samples=3):
            if event.WhichOneof("event") == "delta":
                tokens[event.sample_index] += event.delta.token_ids
            elif event.WhichOneof("event") == "finished":
                accepted += event.finished.usage.num_accepted_draft_tokens
        for index, found in tokens.items():
            alone = await harness.complete(
                **request(PROMPTS[0], {"temperature": 1.2, "seed": 30 + index}),
                disable_speculation=True,
            )
            assert found == alone.token_ids
        assert accepted > 0
        await harness.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_ends_inside_accepted_drafts(kind: str) -> None:
    """Strings, token ids and numbers of tokens end a text where they do without drafts."""
    async with serving(kind) as harness:
        plain = await harness.complete(**request(PROMPTS[1]), disable_speculation=True)
        requests = [request(PROMPTS[1], max_tokens=count) for count in range(1, 9)]
        requests += [
            request(PROMPTS[1], stop=[plain.text[start : start + 3]])
            for start in range(3, len(plain.text) - 3, 2)
        ]
        requests += [
            request(PROMPTS[1], stop_token_ids=[token]) for token in set(plain.token_ids[3:])
        ]
        found: list[Output] = []
        # Four at a time: a step has drafts of several.
        for start in range(0, len(requests), 4):
            found += await both(harness, requests[start : start + 4])
        reasons = {each.finished.reason for each in found}
        assert reasons == {
            sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP
        }  # fmt: skip
        assert num_accepted(found) > 0
        await harness.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_who_is_cancelled_in_the_middle_of_its_drafts_disturbs_nobody(kind: str) -> None:
    """While the draft model works for it, or while a step verifies its drafts."""
    executor = an_executor()
    cancelled: list[bool] = []
    async with serving(kind, executor) as harness:

        async def cancel(message: Any) -> None:
            has_drafts = kind == "draft" or len(message.wanted_token_indexes) // 4 > 4
            if has_drafts and not cancelled:
                cancelled.append(False)
                answer = await harness.stub.Cancel(pb.CancelRequest(request_id="gone"))
                cancelled[0] = answer.was_live

        if kind == "draft":
            executor.before_draft = cancel
        else:
            executor.before_step = cancel
        gone = asyncio.create_task(
            harness.complete(**request(PROMPTS[0], SAMPLINGS["seed"]), request_id="gone")
        )
        await both(harness, [request(each, SAMPLINGS["seed"]) for each in PROMPTS[1:4]])
        assert (await gone).finished.reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert cancelled == [True]
        await harness.wait_idle()
        assert executor.drafter is not None
        assert not executor.drafter.known
        served = harness.server.engine.served
        assert served is not None
        assert served.loop.speculator is not None
        assert served.loop.speculator.num_known == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_prompts_are_read_in_parts_beside_rows_with_drafts(kind: str) -> None:
    async with serving(kind, max_prefill_chunk=4) as harness:
        found = await both(harness, [request(each, SAMPLINGS["seed"]) for each in PROMPTS])
        assert num_accepted(found) > 0
        await harness.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_who_is_preempted_in_the_middle_of_its_drafts_goes_on_the_same(kind: str) -> None:
    """Somebody more urgent comes while it is drafted for, and there is no room for both."""
    executor = an_executor(num_blocks=8, block_size=8)
    urgent: list[asyncio.Task[Output]] = []
    late = request(tuple(range(50, 90)), SAMPLINGS["seed"])
    async with serving(kind, executor) as harness:

        async def come(message: Any) -> None:
            if urgent or (kind == "lookup" and len(message.wanted_token_indexes) // 4 < 2):
                return
            urgent.append(
                asyncio.create_task(harness.complete(**late, priority=pb.PRIORITY_INTERACTIVE))
            )
            served = harness.server.engine.served
            assert served is not None
            state = served.loop.state

            async def has_come() -> bool:
                return len(state.requests) == 2

            await until(has_come)

        if kind == "draft":
            executor.before_draft = come
        else:
            executor.before_step = come
        fields = request(tuple(range(3, 33)), SAMPLINGS["seed"])
        found = await harness.complete(**fields, priority=pb.PRIORITY_BATCH)
        assert found.finished.num_preemptions > 0
        assert num_accepted([found]) > 0
        check(found, await harness.complete(**fields, disable_speculation=True))
        check(await urgent[0], await harness.complete(**late, disable_speculation=True))
        await harness.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefix_that_is_cached_changes_nothing_of_the_drafts(kind: str) -> None:
    """Nor do refused drafts get into the cache: what follows a hit is the same text again."""
    prompt = tuple(range(3, 80))
    async with serving(kind) as harness:
        (first,) = await both(harness, [request(prompt)])
        longer = (*prompt, *first.token_ids[:10])
        again = await both(harness, [request(prompt), request(longer)])
        assert again[0].token_ids == first.token_ids
        for output in again:
            assert output.finished.usage.num_cached_tokens > 0
        # The same drafts as well: they follow known tokens, cached or not.
        if kind == "lookup":
            assert num_drafted([again[0]]) == num_drafted([first])
            assert num_accepted([again[0]]) == num_accepted([first])
        await harness.wait_idle()
