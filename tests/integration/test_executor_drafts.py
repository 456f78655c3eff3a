"""The draft model through the executor's real session: same process, another cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.engine import build_engine
from executor_service.errors import ModelError
from executor_service.models.registry import ModelLocation
from isobatch.executor.v1 import capabilities_pb2, drafts_pb2
from tests.support.executor_harness import (
    Harness,
    SessionClient,
    ready,
    reason_of,
    running,
    step_message,
)
from tests.support.fake_backend import toy_logits
from tests.support.tiny_model import Storage, TinyShape, write_directory

SHAPE = TinyShape(vocab_size=301, context_length=128)
COMPUTED = drafts_pb2.DRAFT_OUTCOME_COMPUTED
FAILED = drafts_pb2.DRAFT_OUTCOME_FAILED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory."""
    folder = tmp_path_factory.mktemp("model")
    write_directory(folder, SHAPE, Storage(4))
    return folder


def draft_message(*rows: tuple[int, int, list[int], int]) -> drafts_pb2.DraftTokens:
    """A request of rows (sequence, first position, tokens, most drafts)."""

    def pack(dtype: str, values: list[Any]) -> bytes:
        return np.array(values, dtype).tobytes()

    return drafts_pb2.DraftTokens(
        row_sequence_ids=pack("<u8", [row[0] for row in rows]),
        row_generations=pack("<u4", [0] * len(rows)),
        row_start_positions=pack("<i4", [row[1] for row in rows]),
        row_num_tokens=pack("<i4", [len(row[2]) for row in rows]),
        row_max_drafts=pack("<i4", [row[3] for row in rows]),
        row_min_confidences=pack("<f4", [0.0] * len(rows)),
        token_ids=pack("<i4", [token for row in rows for token in row[2]]),
    )


def greedy(tokens: list[int], count: int, vocab_size: int) -> list[int]:
    """What the toy model goes on with."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(np.argmax(toy_logits(known, vocab_size))))
    return known[len(tokens) :]


def drafter(harness: Harness) -> Any:
    """The drafter of the running executor."""
    draft = harness.server._host.engine.draft
    assert draft is not None
    return draft.drafter


async def test_drafts_come_between_steps_and_leave_with_their_sequence(model: Path) -> None:
    async with running(model, draft_model=str(model)) as harness:
        reply = await ready(harness)
        target, draft = reply.models
        assert target.role == capabilities_pb2.MODEL_ROLE_TARGET
        assert draft.role == capabilities_pb2.MODEL_ROLE_DRAFT
        assert (draft.max_draft_rows, draft.max_draft_tokens) == (64, 512)
        assert draft.num_blocks == target.num_blocks
        assert draft.numeric_class == target.numeric_class
        async with harness.channel() as channel:
            client = SessionClient(channel)
            await client.start(5)
            await client.open(1, 2)
            await client.step(step_message(1, [(1, [3, 4, 5], 0)]))
            answer = (
                await client.ask(draft=draft_message((1, 0, [3, 4, 5], 3), (9, 0, [3], 1)))
            ).drafted
            assert list(answer.row_outcomes) == [COMPUTED, FAILED]
            found = np.frombuffer(answer.token_ids, "<i4").tolist()
            assert found == greedy([3, 4, 5], 3, SHAPE.vocab_size)
            assert answer.timings.total_ns >= answer.timings.forward_ns > 0
            # The target goes on as if nothing had been: step ids, and the cache behind them.
            result = await client.step(step_message(2, [(1, [found[0]], 3)]))
            wanted = greedy([3, 4, 5, found[0]], 1, SHAPE.vocab_size)
            assert np.frombuffer(result.argmax_ids, "<i4").tolist() == wanted
            kept = drafter(harness)
            assert kept.num_sequences == 1
            released = np.array([1], "<u8").tobytes()
            await client.step(step_message(3, [], released_sequence_ids=released))
            assert kept.num_sequences == 0
            await client.ask(draft=draft_message((2, 0, [3], 1)))
            assert kept.num_sequences == 1
        async with harness.channel() as channel:
            await SessionClient(channel).start(5)
            assert kept.num_sequences == 1
            await SessionClient(channel).start(6)
            assert kept.num_sequences == 0


async def test_without_a_draft_model_and_for_wrong_lengths_the_answer_is_an_error(
    model: Path,
) -> None:
    wrong = draft_message((1, 0, [3], 1))
    wrong.row_num_tokens = b"123"
    short = draft_message((1, 0, [3], 1))
    short.row_generations = b""
    cases: list[tuple[dict[str, Any], drafts_pb2.DraftTokens]] = [
        ({}, draft_message((1, 0, [3], 1))),
        ({"draft_model": str(model)}, wrong),
        ({"draft_model": str(model)}, short),
    ]
    for settings, message in cases:
        async with running(model, **settings) as harness, harness.channel() as channel:
            client = SessionClient(channel)
            await client.start(5)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.ask(draft=message)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(error.value) == "INVALID_REQUEST"
            assert (error.value.details() or "").startswith("[draft] ")


def test_b16_a_draft_model_of_other_tokens_is_refused_at_start(model: Path, tmp_path: Path) -> None:
    write_directory(tmp_path, SHAPE, Storage(4))
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    ids = document["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(document))
    config = ExecutorConfig(listen=f"unix:{tmp_path}/x", draft_model=str(tmp_path))
    with pytest.raises(ModelError, match=r"\[draft\] .* got "):
        build_engine(config, ModelLocation(model, "tiny"), _no_backend, _no_backend)


def _no_backend(*_: Any, **__: Any) -> Any:
    raise AssertionError("a draft model that does not fit must be refused before that")
