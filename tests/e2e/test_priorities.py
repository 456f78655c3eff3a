"""Samples and priority classes through both processes: no token depends on them."""

from __future__ import annotations

import asyncio
from typing import Any

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.bystanders import Output, run


def _ids(count: int, seed: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[(seed * index) % 250 + 3 for index in range(1, count + 1)])


def _stop(max_tokens: int) -> sampling_pb2.StoppingParams:
    return sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)


async def test_samples_share_their_prompt_and_are_the_answers_of_single_requests(stub: Any) -> None:
    """Sample i is the answer of seed + i; the first one is that of a request without samples."""

    def request(seed: int, **fields: Any) -> dict[str, Any]:
        sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=seed)
        # Each with a salt of its own, so that nothing is left of another's prompt.
        return {
            "token_ids": _ids(70, 11), "sampling": sampling, "stopping": _stop(20), **fields,
        }  # fmt: skip

    alone = [await run(stub, **request(40 + i, cache_salt=f"alone {i}")) for i in range(4)]
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    cached: dict[int, int] = {}
    call = stub.Generate(pb.GenerateRequest(**request(40, cache_salt="samples"), num_samples=4))
    async for event in call:
        if event.WhichOneof("event") == "delta":
            tokens[event.sample_index] += event.delta.token_ids
        elif event.WhichOneof("event") == "finished":
            cached[event.sample_index] = event.finished.usage.num_cached_tokens
    assert [tuple(each) for each in tokens.values()] == [each.token_ids for each in alone]
    assert cached[0] == 0
    assert [cached[index] for index in (1, 2, 3)] == [64, 64, 64]


async def test_a_request_that_gives_way_goes_on_with_the_same_tokens(stub: Any) -> None:
    """Two requests of 60 % of the pool: the interactive one takes the other's place."""
    batch: dict[str, Any] = {
        "token_ids": _ids(2400, 3), "stopping": _stop(600), "priority": pb.PRIORITY_BATCH,
    }  # fmt: skip
    urgent: dict[str, Any] = {
        "token_ids": _ids(2400, 7), "stopping": _stop(8), "priority": pb.PRIORITY_INTERACTIVE,
    }  # fmt: skip
    alone = [await run(stub, **each) for each in (batch, urgent)]
    begun = asyncio.Event()
    ends: list[str] = []

    async def ask(name: str, request: dict[str, Any]) -> Output:
        output = await run(stub, begun.set, **request)
        ends.append(name)
        return output

    low = asyncio.create_task(ask("batch", batch))
    await begun.wait()
    together = [await ask("urgent", urgent), await low]
    assert [each.answer for each in together] == [alone[1].answer, alone[0].answer]
    assert ends == ["urgent", "batch"]
    assert together[1].finished.num_preemptions >= 1
