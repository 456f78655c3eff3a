"""What compares an answer with its solo run, and a trace with its replay, sees differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stress.replays import MOST_TRACES, TraceSample, replay_all
from tests.stress.solo_runs import Answer, differences

SOLO = Answer(
    token_ids=[5, 6, 7],
    digests=["0a", "0b", "0c"],
    text="a fox",
    last_text=".",
    reason="stop",
    stop_token_id=2,
)


def _partial(**changes: Any) -> Answer:
    partial = Answer(token_ids=[5, 6], digests=["0a", "0b"], text="a f", reason="cancelled")
    return replace(partial, **changes)


def test_equal_answers_and_beginnings_pass() -> None:
    assert differences(replace(SOLO), SOLO) == []
    assert differences(_partial(), SOLO) == []
    assert differences(_partial(last_text="oreign"), SOLO) == []
    assert differences(Answer(), SOLO) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 6, 8]},
        {"token_ids": [5, 6], "digests": ["0a", "0b"]},
        {"token_ids": [5, 6, 7, 8], "digests": ["0a", "0b", "0c", "0d"]},
        {"digests": ["0a", "0b", "0d"]},
        {"digests": []},
        {"text": "a fix"},
        {"last_text": ""},
        {"reason": "length"},
        {"stop_string": "x"},
        {"stop_token_id": None},
    ],
)
def test_a_whole_answer_must_be_equal(changes: dict[str, Any]) -> None:
    assert differences(replace(SOLO, **changes), SOLO) != []


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 7]},
        {"token_ids": [5, 6, 7, 8], "digests": ["0a", "0b", "0c"]},
        {"digests": ["0a", "0c"]},
        {"digests": ["0a"]},
        {"text": "a ox"},
    ],
)
def test_a_part_must_be_the_beginning(changes: dict[str, Any]) -> None:
    assert differences(_partial(**changes), SOLO) != []


def test_a_replay_that_fails_is_told(tmp_path: Path) -> None:
    sample = TraceSample(str(tmp_path))
    assert [number for number in range(6) if sample.wants(1, number)] == [2, 5]
    for number in range(MOST_TRACES + 1):
        sample.keep(b"no trace", 1, number)
    assert not sample.wants(1, 2)
    count, found = replay_all(tmp_path, f"unix:{tmp_path / 'nobody.sock'}")
    assert (count, len(found)) == (MOST_TRACES, MOST_TRACES)
    assert not TraceSample("").wants(1, 2)
