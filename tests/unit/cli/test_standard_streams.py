"""Standard streams that are full, closed or empty."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from isobatch.scheduler.v1 import scheduler_service_pb2
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(
    not FULL.exists(), reason="this system has no device that is always full"
)


def _run(streams: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program with a shell's redirections, such as `>&-`."""
    command = (sys.executable, "-m", "scheduler_service.cli", *arguments)
    return subprocess.run(
        ("/bin/sh", "-c", f'exec "$@" {streams}', "sh", *command),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@needs_full
@pytest.mark.parametrize("command", ["help", "answer", "object", "table"])
def test_a_full_disk_as_output_is_said_in_a_line(command: str, fake: FakeScheduler) -> None:
    arguments = {
        "help": ("--help",),
        "answer": ("generate", "-p", "x", "--address", fake.address),
        "object": ("generate", "-p", "x", "--json", "--address", fake.address),
        "table": ("models", "--address", fake.address),
    }[command]
    done = _run(">/dev/full", *arguments)
    assert done.returncode == 1
    words = "isobatch: [output] what is printed must be written, got No space left on device\n"
    assert done.stderr == words


@needs_full
def test_a_full_disk_for_remarks_ends_it_after_the_answer(fake: FakeScheduler) -> None:
    done = _run("2>/dev/full", "generate", "-p", "x", "--stats", "--address", fake.address)
    assert (done.returncode, done.stdout) == (1, "w0 w1 w2 w3 w4 \n")


@pytest.mark.parametrize(
    ("closed", "is_shown"),
    [("<&-", True), (">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)],
)
def test_a_closed_stream_harms_no_answer(closed: str, is_shown: bool, fake: FakeScheduler) -> None:
    done = _run(closed, "generate", "-p", "x", "--stats", "--address", fake.address)
    assert done.returncode == 0
    assert done.stdout == ("w0 w1 w2 w3 w4 \n" if is_shown else "")
    assert "Traceback" not in done.stderr
    assert len(fake.requests) == 1


def test_a_character_that_the_terminal_lacks_is_a_question_mark(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        del context
        response = fake_scheduler.delta(0, 1)
        response.delta.text = "sun: \u65e5"
        yield from (fake_scheduler.accepted(request), response, fake_scheduler.finished(1))

    fake.script = answer
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = _run("", "generate", "-p", "x", "-n", "1", "--address", fake.address)
    assert (done.returncode, done.stdout) == (0, "sun: ?\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "tokenize"])
@pytest.mark.parametrize("streams", ["</dev/null", "<&-"])
def test_an_empty_input_is_no_prompt(command: str, streams: str, fake: FakeScheduler) -> None:
    done = _run(streams, command, "--address", fake.address)
    assert done.returncode == 2
    assert "or text on standard input, got none there" in done.stderr
    assert fake.requests == []


@pytest.mark.parametrize("streams", ["</dev/null", "<&-"])
def test_a_chat_without_input_ends(streams: str, fake: FakeScheduler) -> None:
    done = _run(streams, "chat", "--address", fake.address)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
