"""The order of messages where steps are sent ahead."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import prometheus_client
import pytest

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2
from scheduler_service.core import Limits, Request, RequestId, SamplingParams
from scheduler_service.executor_client import SessionLostError
from scheduler_service.fan_out import Totals
from scheduler_service.metrics import SchedulerMetrics, StepPhase
from scheduler_service.step_loop import StepLoop
from scheduler_service.step_sampler import StepSampler
from scheduler_service.streams import TokenStream
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.wire.capabilities import Model

if TYPE_CHECKING:
    import asyncio

    from scheduler_service.executor_client import ExecutorSession

MODEL = Model("m", "toy", 26, 64, "X1", "f16", "w", 8, 16, 1)
LIMITS = Limits(
    max_num_batched_tokens=16, max_num_seqs=4, max_num_waiting=4, block_size=8, num_blocks=16,
    context_length=64,
)  # fmt: skip


class _Session:
    """Answers steps in order, each with the token after the last one; may be lost."""

    def __init__(self, log: list[str], num_answers: int = 1000) -> None:
        self.log = log
        self.num_answers = num_answers
        self.steps: list[bytes] = []
        self._answers: deque[pb.SessionResponse] = deque()
        self._last: dict[int, int] = {}

    async def write(self, message: pb.SessionRequest) -> None:
        if message.WhichOneof("message") == "open":
            opened = token_rows_pb2.SequencesOpened()
            for each in message.open.sequences:
                opened.sequences.add(key=each.key)
            self._answers.append(pb.SessionResponse(opened=opened))
            return
        step = message.step
        self.log.append(f"write {step.step_id}")
        self.steps.append(step.SerializeToString(deterministic=True))
        tokens = np.frombuffer(step.token_ids, "<i4")[
            np.frombuffer(step.wanted_token_indexes, "<i4")
        ]
        keys = np.frombuffer(step.row_sequence_ids, "<u8").tolist()
        is_ahead = token_rows_pb2.TOKEN_SOURCE_STEP_OUTPUT in step.row_token_sources
        for key, token in zip(keys, tokens.tolist(), strict=True):
            self._last[key] = ((self._last[key] if is_ahead else token) + 1) % 26
        ids = np.array([self._last[key] for key in keys], "<i4").tobytes()
        zeros = bytes(4 * len(keys))
        self._answers.append(
            pb.SessionResponse(
                step_result=token_rows_pb2.StepResult(
                    step_id=step.step_id,
                    outcome=token_rows_pb2.STEP_OUTCOME_COMPUTED,
                    row_outcomes=bytes([token_rows_pb2.ROW_OUTCOME_COMPUTED] * len(keys)),
                    argmax_ids=ids, quantile_ids=ids, max_logits=zeros, normalizers=zeros,
                )
            )
        )  # fmt: skip

    async def read(self) -> pb.SessionResponse:
        answer = self._answers.popleft()
        if answer.WhichOneof("message") == "step_result":
            self.num_answers -= 1
            if self.num_answers < 0:
                raise SessionLostError("lost")
            self.log.append(f"read {answer.step_result.step_id}")
        return answer

    async def idle(self, wake: asyncio.Event, timeout_seconds: float | None) -> None:
        raise SessionLostError("nothing to do")


class _Stream(TokenStream):
    """Logs the tokens that reach it."""

    log: list[str]

    def push_token(self, token_id: int, now: float, digest: bytes | None = None) -> bool:
        self.log.append(f"token {token_id}")
        return super().push_token(token_id, now, digest)


class _Clock:
    time = 100.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def _loop(registry: prometheus_client.CollectorRegistry | None = None) -> StepLoop:
    metrics = SchedulerMetrics(registry or prometheus_client.CollectorRegistry(), "1")
    return StepLoop(
        MODEL, LIMITS, StepSampler(vocab_size=26, max_top_k=8), metrics.for_model("m"), Totals(),
        clock=_Clock(), may_look_ahead=True,
    )  # fmt: skip


def _submit(loop: StepLoop, log: list[str], max_tokens: int, **fields: Any) -> TokenStream:
    stops = fields.pop("stops", ())
    request = Request(RequestId("a"), (0,), SamplingParams(), max_tokens, **fields)
    stream = _Stream(request, Detokenizer([bytes([97 + i]) for i in range(26)], frozenset()), stops)
    stream.log = log
    loop.requests.submit(stream)
    return stream


async def _run(loop: StepLoop, session: _Session) -> None:
    with pytest.raises(SessionLostError):
        await loop.run(cast("ExecutorSession", session))


async def test_a_step_is_written_before_the_answer_to_the_last_and_before_its_tokens() -> None:
    log: list[str] = []
    loop = _loop()
    stream = _submit(loop, log, 4)
    await _run(loop, _Session(log))
    assert log == [
        "write 1", "write 2", "read 1", "write 3", "token 1", "read 2", "write 4", "token 2",
        # The length is known: nothing is computed behind it.
        "read 3", "token 3", "read 4",
        # It gives the sequence back.
        "write 5", "token 4", "read 5",
    ]  # fmt: skip
    assert stream.request.output_token_ids == [1, 2, 3, 4]
    assert loop.state.num_vain_rows == 0


async def test_what_is_under_way_when_a_request_stops_is_computed_in_vain() -> None:
    log: list[str] = []
    loop = _loop()
    _submit(loop, log, 20, stop_token_ids=frozenset({2}))
    await _run(loop, _Session(log))
    assert log == [
        "write 1", "write 2", "read 1", "write 3", "token 1", "read 2", "token 2", "read 3",
        "write 4", "read 4",
    ]  # fmt: skip
    assert loop.state.num_vain_rows == 1
    assert not loop.state.requests
    assert not loop.fan_out.streams


async def test_a_stop_string_is_seen_after_the_next_step_was_written() -> None:
    loop, log = _loop(), list[str]()
    stream = _submit(loop, log, 20, stops=("bc",))
    await _run(loop, _Session(log))
    delta = stream.take()
    assert delta is not None
    assert (delta.token_ids, delta.text) == ((1, 2), "")
    assert loop.state.num_vain_rows == 2


@pytest.mark.parametrize("num_answers", [0, 1, 2])
async def test_steps_without_an_answer_are_repeated_in_order_with_the_same_bytes(
    num_answers: int,
) -> None:
    loop = _loop()
    stream = _submit(loop, [], 9)
    session = _Session([], num_answers)
    await _run(loop, session)
    assert loop.state.ahead is not None
    again = _Session([])
    again._last = {1: stream.request.output_token_ids[-1] if num_answers else 0}
    await _run(loop, again)
    assert again.steps[:2] == session.steps[-2:]
    assert stream.request.output_token_ids == list(range(1, 10))


async def test_the_phases_of_all_turns_add_up_to_the_wall_time() -> None:
    registry = prometheus_client.CollectorRegistry()
    loop = _loop(registry)
    _submit(loop, [], 6)
    await _run(loop, _Session([]))
    total = 0.0
    for phase in StepPhase:
        labels = {"model": "m", "phase": phase.value}
        name = "isobatch_scheduler_step_phase_seconds"
        assert registry.get_sample_value(f"{name}_count", labels) == 7
        total += registry.get_sample_value(f"{name}_sum", labels) or 0.0
    wall = registry.get_sample_value("isobatch_scheduler_step_wall_seconds_total", {"model": "m"})
    assert total == wall == int(total)
