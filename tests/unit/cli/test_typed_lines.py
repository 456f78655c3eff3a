"""Lines of standard input, and a signal that comes at the worst moment."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from scheduler_service.cli.typed_lines import TypedLines
from tests.support.open_files import open_files


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = TypedLines(reader)
    os.write(writer, b"one\ntwo\r\n\nno\xff\nthr")
    assert [lines.read_line() for _ in range(3)] == ["one", "two\r", ""]
    with pytest.raises(UnicodeDecodeError):
        lines.read_line()
    os.write(writer, b"ee\n")
    assert lines.read_line() == "three"


def test_the_last_line_needs_no_end() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"last")
    os.close(writer)
    lines = TypedLines(reader)
    assert lines.read_line() == "last"
    for _ in range(2):
        with pytest.raises(EOFError):
            lines.read_line()
    os.close(reader)


def test_a_signal_just_before_the_wait_ends_it(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler has run by then without raising, as if the wait had begun a moment too late."""
    came: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    wait = select.select
    rounds: list[list[int]] = []

    def late(*arguments: Any) -> tuple[list[int], list[int], list[int]]:
        if not rounds:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            os.write(pipe[1], b"line\n")
        found = wait(*arguments)
        rounds.append(found[0])
        return found

    monkeypatch.setattr(select, "select", late)
    try:
        assert TypedLines(pipe[0]).read_line() == "line"
    finally:
        signal.signal(signal.SIGUSR1, former)
    # The first wait had nothing to read, and came back for the signal alone.
    assert (came, len(rounds), pipe[0] in rounds[0]) == ([signal.SIGUSR1], 2, False)


def test_what_a_handler_raises_ends_the_wait(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGUSR1, leave)

    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(select, "select", interrupted)
    before = open_files()
    try:
        with pytest.raises(KeyboardInterrupt):
            TypedLines(pipe[0]).read_line()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert open_files() - before == set()
