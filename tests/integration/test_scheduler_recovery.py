"""The executor goes away in every way it can; streams go on with the tokens they would have had."""

import asyncio
import contextlib
import re
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from scheduler_service.executor_client import (
    ExecutorClient,
    ExecutorSession,
    ExecutorUnavailableError,
)
from tests.support.fake_executor import DropSession, FakeExecutor
from tests.support.scheduler_harness import Harness, collect, running, socket_folder, until
from tests.support.tiny_tokenizer import tokenizer_document, vocab_size
from tests.support.toy_model import ToyModel

NUM_TOKENS = 40
MODEL = ToyModel(vocab_size())
STOPPING = sampling_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


async def _stream(harness: Harness, first: int) -> None:
    seed = 100 + first
    output = await harness.complete(
        token_ids=pb.TokenIds(ids=[first, 4, 5]),
        sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=seed),
        stopping=STOPPING,
    )
    params = SamplingParams(temperature=1.0, seed=seed)
    assert output.token_ids == MODEL.solo_run([first, 4, 5], params, NUM_TOKENS)


async def _streams(harness: Harness) -> None:
    await asyncio.gather(*(_stream(harness, first) for first in range(10, 15)))


class _Trap:
    """A hook that acts once, at one step."""

    def __init__(self, step_id: int, action: Any = None) -> None:
        self.step_id = step_id
        self.action = action
        self.is_sprung = False

    async def __call__(self, step: token_rows_pb2.Step) -> None:
        if step.step_id == self.step_id and not self.is_sprung:
            self.is_sprung = True
            if self.action is not None:
                self.action()
            raise DropSession


async def _until_step(executor: FakeExecutor, count: int) -> None:
    async def holds() -> bool:
        return len(executor.computed_step_ids) >= count

    await until(holds)


async def test_a_restarted_executor_recomputes_and_streams_go_on() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running(executor) as harness:

        async def restart() -> None:
            for count in (8, 20):
                await _until_step(executor, count)
                executor.restart()

        await asyncio.gather(_streams(harness), restart())
        assert harness.metric("executor_reconnects_total", reason="restarted") == 2
        assert harness.metric("preemptions_total", reason="executor_restart") == 10
        assert harness.metric("prompt_tokens_total", source="recomputed") > 0
        await harness.wait_idle()


@pytest.mark.parametrize("when", ["before_step", "after_step"])
@pytest.mark.parametrize("step_id", [1, 9])
async def test_a_lost_answer_is_asked_again_and_computed_once(when: str, step_id: int) -> None:
    executor = FakeExecutor()
    setattr(executor, when, _Trap(step_id))
    async with running(executor) as harness:
        await _streams(harness)
        assert harness.metric("executor_reconnects_total", reason="resumed") == 1
        assert harness.metric("preemptions_total", reason="executor_restart") == 0
        computed = executor.computed_step_ids
        assert computed == list(range(1, len(computed) + 1))
        repeated = [step for step in executor.steps if step.step_id == step_id]
        assert len(repeated) == 2
        assert repeated[0] == repeated[1]


async def test_an_executor_that_forgot_is_taken_for_a_new_one() -> None:
    """The same process, but it refuses the repeated step."""
    executor = FakeExecutor()
    executor.before_step = _Trap(9, lambda: executor.sequences.clear())
    async with running(executor) as harness:
        await _streams(harness)
        assert harness.metric("executor_reconnects_total", reason="restarted") == 1
        await harness.wait_idle()


async def test_an_executor_process_that_dies_comes_back() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running(start_executor=False, fake=executor) as harness:
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
            streams = asyncio.ensure_future(_streams(harness))
            await _until_step(executor, 10)
        await harness.wait_serving(False)
        assert not (await harness.stub.GetStats(pb.GetStatsRequest())).executor_connected
        # While it is away new requests are queued like the others.
        late = asyncio.ensure_future(_stream(harness, 30))
        executor.restart()
        async with executor.serving(harness.executor_address):
            await streams
            await late
            await harness.wait_serving()


async def _ends_unavailable(
    call: Any, words: str, *, reason: str = "EXECUTOR_UNAVAILABLE", pushback: str = "500"
) -> None:
    """The call must end so, with words that match; a negative pushback forbids another attempt."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert re.fullmatch(words, caught.value.details() or "")
    assert ("grpc-retry-pushback-ms", pushback) in list(caught.value.trailing_metadata())
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    assert len(status.details) == (2 if pushback != "-1" else 1)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == reason


async def test_past_the_recovery_deadline_requests_end_with_unavailable() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    settings = {"recovery_deadline_seconds": 0.2}
    async with running(start_executor=False, fake=executor, **settings) as harness:
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
            call = harness.generate(text="wait", stopping=STOPPING)
            await _until_step(executor, 5)
        words = r"\[executor\] it must answer again within 0.2 s, got no session"
        await _ends_unavailable(call, words)
        await _ends_unavailable(harness.generate(text="late"), words)
        assert harness.metric("requests_total", outcome="error") == 1
        executor.restart()
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
            await _stream(harness, 12)


async def test_sessions_that_get_nowhere_are_counted_in_the_error() -> None:
    """The executor comes back again and again, and dies of the first step each time."""
    executor = FakeExecutor()

    async def die(step: token_rows_pb2.Step) -> None:
        executor.restart()
        raise DropSession

    async with running(executor, recovery_deadline_seconds=0.5) as harness:
        await _stream(harness, 12)
        executor.before_step = die
        call = harness.generate(text="wait", stopping=STOPPING)
        words = r"\[executor\] it must answer again within 0.5 s, got [1-9]\d* sessions lost before"
        await _ends_unavailable(call, words)


async def test_an_executor_that_is_given_up_ends_requests_at_once_and_says_why() -> None:
    """Whoever starts it has said that it will not come back: nobody waits for the deadline."""
    executor = FakeExecutor(step_seconds=0.001)
    why = "[supervisor] executor must keep running, got SIGSEGV"
    settings = {"recovery_deadline_seconds": 600.0, "drain_seconds": 600.0}
    async with running(start_executor=False, fake=executor, **settings) as harness:
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
            call = harness.generate(text="wait", stopping=STOPPING)
            await _until_step(executor, 5)
        harness.server.engine.give_executor_up(why)
        expected = {"words": re.escape(why), "reason": "EXECUTOR_FAILED", "pushback": "-1"}
        await _ends_unavailable(call, **expected)
        await _ends_unavailable(harness.generate(text="late"), **expected)
        assert not harness.server.engine.served.loop.state.requests  # type: ignore[union-attr]
        executor.restart()
        # Should it come back all the same, all is well.
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
            await _stream(harness, 12)


async def test_another_model_aborts_live_requests_and_is_served() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running(executor) as harness:
        call = harness.generate(text="wait", stopping=STOPPING)
        await _until_step(executor, 5)
        executor.weights_digest = "w1"
        executor.restart()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await harness.wait_serving()
        await _stream(harness, 12)
        assert harness.metric("executor_reconnects_total", reason="restarted") == 1


async def test_a_restart_with_a_smaller_pool_still_serves() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running(executor) as harness:
        streams = asyncio.ensure_future(_streams(harness))
        await _until_step(executor, 8)
        executor.num_blocks = 6
        executor.restart()
        await streams
        assert executor.peak_blocks <= 64
        assert executor.num_refusals == 0


async def test_the_scheduler_serves_before_the_executor_exists() -> None:
    executor = FakeExecutor(is_ready=False)
    async with running(start_executor=False, fake=executor) as harness:
        await harness.wait_serving(False)
        reply = await harness.stub.ListModels(pb.ListModelsRequest())
        assert not reply.models
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.generate(text="early"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "500") in list(caught.value.trailing_metadata())
        async with executor.serving(harness.executor_address):
            await harness.wait_serving(False)
            executor.is_ready = True
            await harness.wait_serving()
            await _stream(harness, 10)


async def test_the_log_says_once_that_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    executor = FakeExecutor()
    async with running(start_executor=False, fake=executor) as harness:

        async def is_told() -> bool:
            return "waiting_for_executor" in caplog.text

        await until(is_told)
        await asyncio.sleep(1.2)
        async with executor.serving(harness.executor_address):
            await harness.wait_serving()
        assert caplog.text.count("waiting_for_executor") == 1


async def test_an_executor_that_breaks_the_contract_is_tried_again_for_ever() -> None:
    executor = FakeExecutor(num_blocks=0)
    async with (
        running(start_executor=False, fake=executor) as harness,
        executor.serving(harness.executor_address),
    ):
        await asyncio.sleep(0.2)
        await harness.wait_serving(False)
        executor.num_blocks = 64
        await harness.wait_serving()
        await _stream(harness, 10)


@pytest.mark.parametrize(
    ("setting", "bad", "good", "words"),
    [
        (
            "tokenizer_json",
            b"{}",
            tokenizer_document(),
            r"\[tokenizer\] the document must be read.*",
        ),
        ("num_blocks", 0, 64, r"\[capabilities\] num_blocks must be .*, got 0"),
    ],
)
async def test_an_executor_that_cannot_be_used_is_named_to_clients_and_once_in_the_log(
    setting: str, bad: Any, good: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = FakeExecutor(**{setting: bad})
    async with (
        running(start_executor=False, fake=executor) as harness,
        executor.serving(harness.executor_address),
    ):

        async def is_refused() -> bool:
            return "executor_session_refused" in caplog.text

        await until(is_refused)
        await asyncio.sleep(0.3)
        await _ends_unavailable(
            harness.generate(text="x"), rf"\[scheduler\] the executor is not ready: {words}"
        )
        assert caplog.text.count("executor_session_refused") == 1
        setattr(executor, setting, good)
        executor.restart()
        await harness.wait_serving()
        await _stream(harness, 10)


async def test_a_refusal_for_want_of_blocks_preempts_and_goes_on() -> None:
    """The executor has fewer blocks than it says."""
    executor = FakeExecutor(num_blocks=40, block_size=4)
    async with running(executor) as harness:
        executor.num_blocks = 20
        await _streams(harness)
        assert executor.num_refusals > 0
        assert harness.metric("preemptions_total", reason="capacity") > 0


async def test_a_later_scheduler_takes_over_and_the_earlier_waits_until_it_is_gone() -> None:
    executor = FakeExecutor(step_seconds=0.001)
    async with running(executor, recovery_deadline_seconds=0.1) as earlier:
        call = earlier.generate(text="mine", stopping=STOPPING)
        await _until_step(executor, 3)
        settings = {"executor": earlier.executor_address}
        async with running(executor, start_executor=False, **settings) as later:
            await later.wait_serving()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await earlier.wait_serving(False)
            await _stream(later, 12)
        await earlier.wait_serving()
        await _stream(earlier, 13)


async def test_a_clock_that_was_set_back_keeps_no_scheduler_out() -> None:
    """Who has just started goes above the epoch that the executor knows, and works."""
    ahead = time.time_ns() + 10**18
    async with running(FakeExecutor(scheduler_epoch=ahead)) as harness:
        await _stream(harness, 10)
        assert harness.executor.scheduler_epoch > ahead + 1


async def test_a_scheduler_that_was_replaced_comes_back_only_once_the_other_is_gone() -> None:
    """Not even with the epoch that follows its own, and the new one keeps its session."""
    executor = FakeExecutor()
    with socket_folder() as folder:
        address = f"unix:{folder}/x.sock"
        async with executor.serving(address):
            old, new = ExecutorClient(address), ExecutorClient(address)
            executor.scheduler_epoch = time.time_ns() + 10**18
            first = await old.connect()
            second = await new.connect()
            for _ in range(3):
                with pytest.raises(ExecutorUnavailableError, match="FAILED_PRECONDITION"):
                    await old.connect()
            assert first.scheduler_epoch < second.scheduler_epoch == executor.scheduler_epoch
            with pytest.raises(ExecutorUnavailableError, match="FAILED_PRECONDITION"):
                await old.connect(first)
            await first.close()
            await second.close()
            third = await _until_connected(old, first)
            assert third.scheduler_epoch > second.scheduler_epoch
            with pytest.raises(ExecutorUnavailableError, match="FAILED_PRECONDITION"):
                await new.connect(second)
            await third.close()


async def _until_connected(client: ExecutorClient, resume: ExecutorSession) -> ExecutorSession:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ExecutorUnavailableError):
                return await client.connect(resume)
            await asyncio.sleep(0.01)
