"""The order of a step, its phases, and what the loop does between steps."""

import asyncio
from typing import Any, cast

import numpy as np
import prometheus_client
import pytest

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2
from scheduler_service.core import Limits, Request, RequestId, SamplingParams
from scheduler_service.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    SlowReaderError,
)
from scheduler_service.executor_client import ExecutorSession, SessionLostError
from scheduler_service.fan_out import Totals
from scheduler_service.metrics import SchedulerMetrics, StepPhase
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.step_loop import StepLoop
from scheduler_service.step_sampler import StepSampler
from scheduler_service.streams import Delta, TokenStream
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.wire.capabilities import Model

PIECES = [bytes([97 + i]) for i in range(26)]
MODEL = Model("m", "toy", 26, 64, "X1", "f16", "w", 8, 16, 1)


class _Session:
    """Records what is written; answers each step with the token after the row's last one."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.answers: list[pb.SessionResponse] = []
        self.steps_before_loss = 1000

    async def write(self, message: pb.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        self.log.append(f"write {kind}")
        if kind == "open":
            keys = [each.key for each in message.open.sequences]
            opened = token_rows_pb2.SequencesOpened()
            for key in keys:
                opened.sequences.add(key=key)
            self.answers.append(pb.SessionResponse(opened=opened))
            return
        step = message.step
        count = len(step.row_num_tokens) // 4
        wanted = np.frombuffer(step.wanted_token_indexes, "<i4")
        tokens = np.frombuffer(step.token_ids, "<i4")
        ids = ((tokens[wanted] + 1) % 26).astype("<i4")
        zeros = np.zeros(len(wanted), "<f4").tobytes()
        self.answers.append(
            pb.SessionResponse(
                step_result=token_rows_pb2.StepResult(
                    step_id=step.step_id,
                    outcome=token_rows_pb2.STEP_OUTCOME_COMPUTED,
                    row_outcomes=bytes([token_rows_pb2.ROW_OUTCOME_COMPUTED] * count),
                    argmax_ids=ids.tobytes(),
                    quantile_ids=ids.tobytes(),
                    max_logits=zeros,
                    normalizers=zeros,
                )
            )
        )

    async def read(self) -> pb.SessionResponse:
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        self.log.append(f"read {answer.WhichOneof('message')}")
        if answer.WhichOneof("message") == "step_result":
            self.steps_before_loss -= 1
            if self.steps_before_loss < 0:
                raise SessionLostError("lost")
        return answer

    async def idle(self, wake: asyncio.Event, timeout_seconds: float | None) -> None:
        self.log.append("idle")
        raise SessionLostError("nothing to do")


class _Stream(TokenStream):
    """Logs the tokens that reach it."""

    log: list[str]

    def push_token(self, token_id: int, now: float, digest: bytes | None = None) -> bool:
        self.log.append(f"token {self.request.request_id}{len(self.request.output_token_ids)}")
        return super().push_token(token_id, now, digest)


class _Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def _loop(
    registry: prometheus_client.CollectorRegistry | None = None,
    slow_readers: SlowReaders | None = None,
    **limits: int,
) -> StepLoop:
    values: dict[str, Any] = {
        "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_num_waiting": 4, "block_size": 8,
        "num_blocks": 16, "context_length": 64,
    } | limits  # fmt: skip
    metrics = SchedulerMetrics(registry or prometheus_client.CollectorRegistry(), "1")
    sampler = StepSampler(vocab_size=26, max_top_k=8)
    return StepLoop(
        MODEL, Limits(**values), sampler, metrics.for_model("m"), Totals(), clock=_Clock(),
        slow_readers=slow_readers,
    )  # fmt: skip


def _submit(
    loop: StepLoop, name: str, log: list[str], max_tokens: int = 3, **fields: Any
) -> TokenStream:
    stops = fields.pop("stops", ())
    request = Request(RequestId(name), (0,), SamplingParams(), max_tokens, **fields)
    stream = _Stream(request, Detokenizer(PIECES, frozenset()), stops)
    stream.log = log
    loop.requests.submit(stream)
    return stream


async def _run(loop: StepLoop, session: _Session) -> None:
    with pytest.raises(SessionLostError):
        await loop.run(cast("ExecutorSession", session))


async def test_the_next_step_is_written_before_tokens_are_fanned_out() -> None:
    log: list[str] = []
    loop = _loop()
    _submit(loop, "a", log)
    await _run(loop, _Session(log))
    assert log == [
        # Only where somebody is to be admitted is the executor asked first.
        "write open", "read opened", "write step", "read step_result",
        "write step", "token a1", "read step_result",
        "write step", "token a2", "read step_result",
        # The last step only gives the sequence back.
        "write step", "token a3", "read step_result",
        "idle",
    ]  # fmt: skip


async def test_a_stop_string_drops_the_row_in_flight_and_frees_the_sequence() -> None:
    log: list[str] = []
    loop = _loop()
    stream = _submit(loop, "a", log, max_tokens=20, stops=("bc",))
    await _run(loop, _Session(log))
    delta = stream.take()
    assert delta is not None
    assert (delta.token_ids, delta.text) == ((1, 2), "")
    assert stream.ending is not None
    assert stream.ending.stop_string == "bc"
    # Steps for b, c, the dropped d, and the release.
    assert log.count("write step") == 4
    assert not loop.state.requests


async def test_the_phases_of_a_step_add_up_to_its_wall_time() -> None:
    registry = prometheus_client.CollectorRegistry()
    loop = _loop(registry)
    _submit(loop, "a", [])
    await _run(loop, _Session([]))
    total = 0.0
    for phase in StepPhase:
        labels = {"model": "m", "phase": phase.value}
        name = "isobatch_scheduler_step_phase_seconds"
        assert registry.get_sample_value(f"{name}_count", labels) == 4
        total += registry.get_sample_value(f"{name}_sum", labels) or 0.0
    # The clock of the test ticks once at each look: wall time is a whole number of ticks.
    assert total == int(total) > 0


def test_the_phases_are_disjoint_whatever_the_executor_says() -> None:
    times = PhaseTimes(1.0, 2.0, 0.25, 4.0, 8.0, 16.0, 32.0)
    for executor_seconds in (0.0, 3.0, 8.0, 50.0):
        phases = times.phases(executor_seconds)
        assert set(phases) == set(StepPhase)
        assert sum(phases.values()) == 31.0
        assert min(phases.values()) >= 0.0
        assert phases[StepPhase.FORWARD] == min(executor_seconds, 8.0)
        assert phases[StepPhase.PLAN] == 0.75


async def test_a_step_in_flight_is_repeated_with_the_same_bytes() -> None:
    loop = _loop()
    log: list[str] = []
    stream = _submit(loop, "a", log)
    session = _Session(log)
    session.steps_before_loss = 1
    await _run(loop, session)
    assert loop.state.in_flight is not None
    assert loop.state.step_id == 2
    again = _Session([])
    await _run(loop, again)
    assert again.log[0] == "write step"
    assert stream.request.output_token_ids == [1, 2, 3]


async def test_a_cancel_during_a_step_reaches_the_stream_at_once() -> None:
    loop = _loop()
    log: list[str] = []
    stream = _submit(loop, "a", log, max_tokens=20)

    class Cancelling(_Session):
        async def read(self) -> pb.SessionResponse:
            answer = await super().read()
            if len(stream.request.output_token_ids) == 2 and not stream.is_over:
                assert loop.requests.cancel(RequestId("a"))
                assert stream.is_over
            return answer

    await _run(loop, Cancelling(log))
    assert stream.request.output_token_ids == [1, 2]
    assert not loop.requests.cancel(RequestId("a"))


async def test_an_id_that_is_used_again_at_once_is_another_stream() -> None:
    """Its last user has ended, and has not been told: the next step is written first."""
    loop, log = _loop(), list[str]()
    first = _submit(loop, "a", log, max_tokens=2)
    second: list[TokenStream] = []

    class _Again(_Session):
        async def write(self, message: pb.SessionRequest) -> None:
            await super().write(message)
            if not loop.state.requests and not second:
                assert first.ending is None
                second.append(_submit(loop, "a", log, max_tokens=3))

    await _run(loop, _Again(log))
    assert first.ending is not None
    assert first.take() == Delta(0, (1, 2), "bc", ())
    assert second[0].ending is not None
    assert second[0].take() == Delta(0, (1, 2, 3), "bcd", ())
    assert not loop.fan_out.streams


async def test_a_digest_of_a_request_that_has_ended_is_not_kept() -> None:
    loop, log = _loop(), list[str]()

    class _Leaving(_Session):
        async def read(self) -> pb.SessionResponse:
            answer = await super().read()
            if answer.WhichOneof("message") == "step_result":
                loop.requests.cancel(RequestId("a"))
                count = len(answer.step_result.argmax_ids) // 4
                answer.step_result.digests = bytes([7]) * 16 * count
            return answer

    request = Request(RequestId("a"), (0,), SamplingParams(), 9)
    loop.requests.submit(TokenStream(request, Detokenizer(PIECES, frozenset()), wants_digests=True))
    await _run(loop, _Leaving(log))
    assert not loop.fan_out.num_kept_digests


async def test_a_cancel_at_the_deadline_counts_as_the_deadline() -> None:
    loop = _loop()
    stream = _submit(loop, "a", [], deadline=50.0)
    loop.requests.cancel(RequestId("a"))
    assert stream.error is not None
    assert stream.error.reason == "DEADLINE_EXCEEDED"


async def test_refusals_of_the_core_become_errors_of_the_call() -> None:
    loop = _loop(max_num_waiting=1)
    with pytest.raises(InvalidRequestError) as caught:
        _submit(loop, "a", [], max_tokens=0)
    assert caught.value.field == "stopping.max_tokens"
    _submit(loop, "b", [])
    with pytest.raises(OverloadedError):
        _submit(loop, "c", [])


async def test_giving_up_ends_every_stream_with_the_error() -> None:
    loop = _loop()
    streams = [_submit(loop, name, []) for name in "ab"]
    loop.requests.give_up(lambda: InternalError("gone"))
    assert [str(stream.error) for stream in streams] == ["gone", "gone"]
    assert not loop.state.requests


async def test_a_request_whose_reader_is_behind_pauses_and_the_others_go_on() -> None:
    """It goes on when its reader comes back, with the tokens that it would have had."""
    log: list[str] = []
    loop = _loop(slow_readers=SlowReaders(2, 1e9))
    slow = _submit(loop, "a", log, max_tokens=9)
    quick = _submit(loop, "b", log, max_tokens=9)
    quick.push_token = _take_at_once(quick)  # type: ignore[method-assign]
    await _run(loop, _Session(log))
    assert list(loop.state.requests) == ["a"]
    # The bound, the token beyond it, and that of the step that was under way.
    assert slow.num_pending == 4
    assert log[-1] == "idle"
    delta = slow.take()
    assert delta is not None
    slow.push_token = _take_at_once(slow)  # type: ignore[method-assign]
    await _run(loop, _Session(log))
    assert not loop.state.requests
    assert list(slow.request.output_token_ids) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


async def test_a_reader_that_never_comes_back_ends_its_request() -> None:
    log: list[str] = []
    loop = _loop(slow_readers=SlowReaders(2, 500.0))
    slow = _submit(loop, "a", log, max_tokens=9)
    await _run(loop, _Session(log))
    assert not slow.is_over
    cast("_Clock", loop._clock).time += 500.0
    await _run(loop, _Session(log))
    assert isinstance(slow.error, SlowReaderError)
    assert not loop.state.requests
    assert len(loop.fan_out.slow_readers) == 0


def _take_at_once(stream: TokenStream) -> Any:
    push = type(stream).push_token

    def push_and_take(token_id: int, now: float, digest: bytes | None = None) -> bool:
        is_over = push(stream, token_id, now, digest)
        stream.take()
        return is_over

    return push_and_take
