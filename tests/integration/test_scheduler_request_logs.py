"""What a request leaves in the log: its id and its numbers, and its words only when asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler_service import logs
from tests.support.scheduler_harness import running


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A log file that everything goes to."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    file = tmp_path / "scheduler.log"
    logs.configure("debug", "json", file=str(file))
    yield file
    for each in root.handlers:
        each.close()
    root.handlers[:], root.level = handlers, level


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def _ask(**settings: Any) -> None:
    async with running(**settings) as harness:
        output = await harness.complete(text="one two three", request_id="r1", stopping={
            "max_tokens": 4, "ignore_eos": True,
        })  # fmt: skip
        assert len(output.token_ids) == 4
        with pytest.raises(grpc.aio.AioRpcError):
            await harness.complete(text="four five", sampling={"temperature": -1.0})


async def test_a_request_is_named_and_counted(path: Path) -> None:
    await _ask()
    (finished,) = [each for each in _lines(path) if each["event"] == "request_finished"]
    assert finished["request_id"] == "r1"
    assert (finished["outcome"], finished["generated_tokens"]) == ("length", 4)
    # At the earliest the fourth step's line; what is bound is the step being taken.
    assert finished["step_id"] >= 4
    assert finished["seconds"] >= 0
    for words in ("one two", "two three", "four five"):
        assert words not in json.dumps(_lines(path))


async def test_prompts_are_there_when_asked_for(path: Path) -> None:
    await _ask(log_prompts=True)
    (accepted,) = [each for each in _lines(path) if each["event"] == "request_accepted"]
    assert (accepted["request_id"], accepted["prompt"]) == ("r1", "one two three")
