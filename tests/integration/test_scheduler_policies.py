"""Samples, priorities, deadlines, bounds and slow readers through a real server."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service.core import SchedulerState
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, running, until

PROMPT = pb.TokenIds(ids=list(range(5, 45)))  # two blocks and a half
CODE = grpc.StatusCode


def _stopping(max_tokens: int) -> sampling_pb2.StoppingParams:
    return sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)


def _state(harness: Harness) -> SchedulerState:
    served = harness.server.engine.served
    assert served is not None
    return served.loop.state


async def _samples(call: Any) -> tuple[pb.Accepted, dict[int, list[int]], dict[int, pb.Finished]]:
    """Read a call with several samples and check its shape."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, pb.Finished] = {}
    accepted = None
    async for event in call:
        kind, index = event.WhichOneof("event"), event.sample_index
        if kind == "accepted":
            assert accepted is None
            accepted = event.accepted
            continue
        assert accepted is not None
        assert index not in ends
        if kind == "delta":
            assert event.delta.start_index == len(tokens[index])
            tokens[index] += event.delta.token_ids
        else:
            ends[index] = event.finished
    assert accepted is not None
    return accepted, tokens, ends


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str], float | None]:
    """Return the code, reason, metadata and retry hint of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    wrong = error_details_pb2.BadRequest()
    for detail in status.details:
        assert detail.Unpack(info) or detail.Unpack(retry) or detail.Unpack(wrong)
    delay = retry.retry_delay
    seconds = delay.seconds + delay.nanos / 1e9 if retry.ByteSize() else None
    return caught.value.code(), info.reason, dict(info.metadata), seconds


async def _holding(harness: Harness, **fields: Any) -> Any:
    """Start a request that runs for long, and return its call once it has a token."""
    call = harness.generate(text="hold", stopping=_stopping(400), **fields)
    async for event in call:
        if event.WhichOneof("event") == "delta":
            return call
    raise AssertionError("it must run")


async def _waiting(harness: Harness, count: int) -> None:
    async def holds() -> bool:
        return len(_state(harness).waiting) == count

    await until(holds)


@pytest.mark.parametrize("coalesce_ms", [0, 5])
async def test_samples_are_the_answers_of_the_following_seeds(coalesce_ms: int) -> None:
    """The first is the answer without others; seeds wrap around; the prompt is computed once."""
    seed = 2**64 - 2
    async with running(FakeExecutor()) as harness:
        accepted, tokens, ends = await _samples(
            harness.generate(
                token_ids=PROMPT, num_samples=4, stopping=_stopping(9), coalesce_ms=coalesce_ms,
                sampling=sampling_pb2.SamplingParams(temperature=2.0, seed=seed),
            )
        )  # fmt: skip
        assert (accepted.num_samples, accepted.seed) == (4, seed)
        assert set(tokens) == set(ends) == {0, 1, 2, 3}
        cached = [ends[index].usage.num_cached_tokens for index in range(4)]
        assert cached == [0, 32, 32, 32]
        for index in range(4):
            sampling = sampling_pb2.SamplingParams(temperature=2.0, seed=(seed + index) % 2**64)
            alone = await harness.complete(
                token_ids=PROMPT, stopping=_stopping(9), sampling=sampling
            )
            assert tokens[index] == alone.token_ids
        assert len({tuple(each) for each in tokens.values()}) > 1
        await harness.wait_idle()


async def test_cancelling_a_call_ends_all_its_samples() -> None:
    """By its id, and by leaving."""
    async with running(FakeExecutor(step_seconds=0.002)) as harness:
        call = await _holding(harness, num_samples=3, request_id="group")
        assert len(_state(harness).requests) == 3
        answer = await harness.stub.Cancel(pb.CancelRequest(request_id="group"))
        assert answer.was_live
        async for event in call:
            if event.WhichOneof("event") == "finished":
                assert event.finished.reason == sampling_pb2.FINISH_REASON_CANCELLED
        answer = await harness.stub.Cancel(pb.CancelRequest(request_id="group"))
        assert not answer.was_live
        call = await _holding(harness, num_samples=3)
        call.cancel()
        await harness.wait_idle()


async def test_ids_of_calls_never_meet_those_of_samples() -> None:
    """A client may choose an id that looks like a sample's, and hears of it as it was chosen."""
    async with running(FakeExecutor(step_seconds=0.002)) as harness:
        calls = [
            await _holding(harness, num_samples=count, request_id=request_id)
            for request_id, count in (("a#1", 1), ("a", 3), ("a#2", 2), ("a#1#0", 1))
        ]
        assert len(_state(harness).requests) == 7
        found = await _refusal(harness.generate(text="x", request_id="a#1"))
        assert found[:2] == (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        echoed = harness.generate(text="x", request_id="b#3")
        assert (await anext(aiter(echoed))).accepted.request_id == "b#3"
        assert (await harness.stub.Cancel(pb.CancelRequest(request_id="a#1"))).was_live
        await until(lambda: _has_live(harness, {"a", "a#2", "a#1#0"}))
        for call in calls:
            call.cancel()
        echoed.cancel()
        await harness.wait_idle()


async def _has_live(harness: Harness, calls: set[str]) -> bool:
    return calls == {each.group_id for each in _state(harness).requests.values()} - {"b#3"}


async def test_a_call_lives_until_its_last_sample_has_ended() -> None:
    async with running(FakeExecutor(step_seconds=0.002)) as harness:
        call = await _holding(harness, num_samples=2, request_id="a")
        served = harness.server.engine.served
        assert served is not None
        first = next(each for each in _state(harness).requests)
        assert served.loop.requests.cancel(first)
        found = await _refusal(harness.generate(text="x", request_id="a"))
        assert found[:2] == (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        call.cancel()
        await harness.wait_idle()


async def test_samples_that_do_not_all_fit_the_queue_are_refused_together() -> None:
    async with running(
        FakeExecutor(step_seconds=0.001), max_num_seqs=1, max_num_waiting=3
    ) as harness:
        calls = [await _holding(harness), harness.generate(text="wait")]
        await anext(aiter(calls[1]))
        found = await _refusal(harness.generate(text="x", num_samples=3))
        assert found[:2] == (CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        for call in calls:
            call.cancel()
        await harness.wait_idle()
        assert harness.metric("refusals_total", reason="queue_requests") == 1


async def test_more_samples_than_the_queue_ever_holds_are_an_invalid_request() -> None:
    async with running(FakeExecutor(), max_num_waiting=3) as harness:
        call = harness.generate(text="x", num_samples=4)
        found = await _refusal(call)
        assert found == (CODE.INVALID_ARGUMENT, "INVALID_PARAMETER", {}, None)
        words = "[submit] num_samples must be at most max_num_waiting, 3, got 4"
        assert await call.details() == words
        await harness.wait_idle()
        assert harness.metric("refusals_total", reason="invalid") == 1


async def test_a_higher_class_goes_first_and_takes_a_slot() -> None:
    """The running request of the lower class goes on later with the tokens it would have had."""
    executor = FakeExecutor(step_seconds=0.001)
    async with running(executor, max_num_seqs=1) as harness:
        alone = await harness.complete(text="hold", stopping=_stopping(300))
        low = harness.generate(text="hold", stopping=_stopping(300), priority=pb.PRIORITY_BATCH)
        ends: list[str] = []

        async def follow(name: str, call: Any) -> pb.Finished:
            _, tokens, finished = await _samples(call)
            assert tokens[0] == alone.token_ids[: len(tokens[0])]
            ends.append(name)
            return finished[0]

        async def after_two_tokens() -> bool:
            return any(len(each.output_token_ids) > 2 for each in _state(harness).running.values())

        waiting = asyncio.ensure_future(follow("low", low))
        await until(after_two_tokens)
        others = [
            follow(name, harness.generate(text="hold", stopping=_stopping(5), priority=priority))
            for name, priority in (
                ("batch", pb.PRIORITY_BATCH),
                ("normal", pb.PRIORITY_NORMAL),
                ("interactive", pb.PRIORITY_INTERACTIVE),
            )
        ]
        await asyncio.gather(*others)
        finished = await waiting
        assert finished.num_preemptions >= 1
        assert ends.index("interactive") < ends.index("normal") < ends.index("batch")
        assert ends.index("normal") < ends.index("low")
        assert harness.metric("preemptions_total", reason="priority") >= 1
        await harness.wait_idle()


async def test_a_deadline_out_of_reach_is_refused_at_once() -> None:
    """With a hint where the queue is the reason, without one where the prompt is."""
    async with running(FakeExecutor(step_seconds=0.001), max_num_seqs=1) as harness:
        call = await _holding(harness)
        # A second for each token of a prompt.
        _state(harness).service_rate.record_step(100, 100, 100.0)
        found = await _refusal(harness.generate(timeout=20.0, token_ids=PROMPT))
        assert found[:2] == (CODE.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE")
        assert found[3] is None
        other = harness.generate(token_ids=PROMPT)
        await _waiting(harness, 1)
        found = await _refusal(harness.generate(timeout=20.0, token_ids=pb.TokenIds(ids=[5, 6])))
        assert found[:2] == (CODE.RESOURCE_EXHAUSTED, "DEADLINE_UNREACHABLE")
        assert found[3] is not None
        assert 20.0 < found[3] < 60.0
        assert float(found[2]["needed_seconds"]) > float(found[2]["left_seconds"]) > 0
        assert harness.metric("refusals_total", reason="deadline_unreachable") == 2
        for each in (call, other):
            each.cancel()
        await harness.wait_idle()


async def test_waiting_tokens_are_bounded_and_counted() -> None:
    async with running(
        FakeExecutor(step_seconds=0.001), max_num_seqs=1, max_waiting_tokens=50
    ) as harness:
        call = await _holding(harness)
        other = harness.generate(token_ids=PROMPT, priority=pb.PRIORITY_BATCH)
        await _waiting(harness, 1)
        found = await _refusal(harness.generate(token_ids=pb.TokenIds(ids=[5] * 11)))
        assert found[:3] == (
            CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"max_waiting_tokens": "50"},
        )  # fmt: skip
        assert found[3] is not None
        stats = await harness.stub.GetStats(pb.GetStatsRequest())
        assert (stats.num_waiting, stats.num_waiting_batch, stats.num_waiting_tokens) == (1, 1, 40)
        assert harness.metric("refusals_total", reason="queue_tokens") == 1
        assert harness.metric("waiting_tokens") == 40
        assert harness.metric("requests_waiting_by_class", priority="batch") == 1
        for each in (call, other):
            each.cancel()
        await harness.wait_idle()
        assert harness.metric("waiting_tokens") == 0


SMALL_WINDOW = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
]


async def test_a_client_that_does_not_read_is_paused_and_nobody_else() -> None:
    """It goes on where it stopped once it reads; one that never does gets an error."""
    executor = FakeExecutor(num_blocks=4096, context_length=60_000)
    async with running(executor, max_undelivered_tokens=16) as harness:
        address = f"unix:{harness.socket}"
        async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
            stub = pb_grpc.SchedulerServiceStub(channel)
            call: Any = stub.Generate(
                pb.GenerateRequest(
                    text="hold", return_logits_digests=True, stopping=_stopping(50_000)
                )
            )
            await call.read()

            async def paused() -> bool:
                return harness.metric("streams_paused") == 1

            (slow,) = _state(harness).requests.values()
            for _ in range(20):
                # The transport may still take some, and the pause end for a moment.
                await until(paused)
                num_tokens = len(slow.output_token_ids)
                await harness.complete(text="other", stopping=_stopping(50))
                if len(slow.output_token_ids) <= num_tokens + 1:
                    break
            assert len(slow.output_token_ids) <= num_tokens + 1
            assert (await harness.stub.GetStats(pb.GetStatsRequest())).num_paused == 1
            seen: list[int] = []
            while len(seen) <= num_tokens + 50:
                event = await call.read()
                assert event.delta.start_index == len(seen)
                seen += event.delta.token_ids
            alone = await harness.complete(text="hold", stopping=_stopping(len(seen)))
            assert seen == alone.token_ids
            call.cancel()
        await harness.wait_idle()
        assert harness.metric("streams_paused") == 0


async def test_a_client_that_never_reads_gives_its_place_up() -> None:
    executor = FakeExecutor(num_blocks=4096, context_length=60_000)
    async with running(executor, max_undelivered_tokens=16, slow_reader_seconds=0.05) as harness:
        address = f"unix:{harness.socket}"
        async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
            stub = pb_grpc.SchedulerServiceStub(channel)
            request = pb.GenerateRequest(
                text="hold", return_logits_digests=True, stopping=_stopping(50_000)
            )
            call: Any = stub.Generate(request)
            await anext(aiter(call))
            await until(lambda: _is_over(harness))
            await harness.wait_idle()
            found = await _refusal(call)
            assert found[:2] == (CODE.RESOURCE_EXHAUSTED, "SLOW_READER")
        assert harness.metric("requests_total", outcome="cancelled") == 1


async def _is_over(harness: Harness) -> bool:
    return not _state(harness).requests
