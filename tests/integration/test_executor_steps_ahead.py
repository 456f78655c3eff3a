"""Steps that reach the executor before it has answered the ones ahead of them, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from isobatch.executor.v1 import token_rows_pb2 as rows_pb
from tests.support.executor_harness import Harness, SessionClient, reason_of, running, step_message
from tests.support.fake_backend import POISON_TOKEN, toy_logits
from tests.support.tiny_model import Storage, TinyShape, write_directory

SHAPE = TinyShape(num_layers=1, vocab_size=64)
OUTPUT = bytes([rows_pb.TOKEN_SOURCE_STEP_OUTPUT])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(path, SHAPE, Storage(4))
    return path


@pytest.fixture
async def harness(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Harness]:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    async with running(model) as started:
        yield started


def _ahead(step_id: int, start: int, sequence_id: int = 1) -> rows_pb.Step:
    """A step of one row that takes its token from the step before."""
    return step_message(
        step_id, [(sequence_id, [0], start)],
        row_token_sources=OUTPUT,
        row_source_steps=np.array([step_id - 1], "<u8").tobytes(),
        row_source_wanted=bytes(4),
    )  # fmt: skip


def _text(first: int, count: int) -> list[int]:
    text = [first]
    for _ in range(count):
        text.append(int(np.argmax(toy_logits(text, SHAPE.vocab_size))))
    assert POISON_TOKEN not in text
    return text[1:]


def _token(result: rows_pb.StepResult) -> int:
    return int(np.frombuffer(result.argmax_ids, "<i4")[0])


async def test_four_steps_at_once_are_answered_in_order(harness: Harness) -> None:
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        await client.open(1)
        await client.send(step=step_message(1, [(1, [5], 0)]))
        for step_id in range(2, 6):
            await client.send(step=_ahead(step_id, step_id - 1))
        results = [(await client.read()).step_result for _ in range(5)]
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    assert [_token(result) for result in results] == _text(5, 5)
    # The time of each counts from the end of the one before it.
    assert all(result.timings.queue_ns <= result.timings.total_ns for result in results)


@pytest.mark.parametrize("num_seen", [0, 1])
async def test_a_resumed_session_gets_what_it_has_not_seen_and_nothing_is_computed_twice(
    harness: Harness, num_seen: int
) -> None:
    steps = [step_message(1, [(1, [5], 0)]), _ahead(2, 1)]
    num_runs = harness.backends[0].num_runs
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        await client.open(1)
        for step in steps:
            await client.send(step=step)
        for _ in range(num_seen):
            await client.read()
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        for step in steps[num_seen:]:
            await client.send(step=step)
        await client.send(step=_ahead(3, 2))
        results = [(await client.read()).step_result for _ in range(3 - num_seen)]
    assert [_token(result) for result in results] == _text(5, 3)[num_seen:]
    assert harness.backends[0].num_runs == num_runs + 3


async def test_an_error_ends_the_stream_after_the_answers_before_it(harness: Harness) -> None:
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        await client.open(1)
        await client.send(step=step_message(1, [(1, [5], 0)]))
        await client.send(step=_ahead(2, 7))
        await client.send(step=_ahead(3, 8))
        assert _token((await client.read()).step_result) == _text(5, 1)[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.read()
        assert reason_of(caught.value) == "INVALID_STEP"
    # The session goes on behind the step that was right.
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        assert _token(await client.step(_ahead(2, 1))) == _text(5, 2)[1]


async def test_other_requests_wait_for_the_steps_ahead_of_them(harness: Harness) -> None:
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(1)
        await client.open(1)
        await client.send(step=step_message(1, [(1, [5], 0)]))
        await client.send(step=_ahead(2, 1))
        sequence_ids = np.array([1], "<u8").tobytes()
        await client.send(release=rows_pb.ReleaseSequences(sequence_ids=sequence_ids))
        kinds = [(await client.read()).WhichOneof("message") for _ in range(3)]
    assert kinds == ["step_result", "step_result", "released"]
