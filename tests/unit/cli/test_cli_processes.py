"""The program as users start it: signals, terminals and child processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from scheduler_service.cli.last_words import error_in
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler

FAKE_SERVICES = Path(fake_scheduler.__file__).with_name("fake_services.py")

# The program with stand-ins for the services that it starts. A test run in the background ignores
# Ctrl-C, and children inherit that; nothing is to run between fork and exec, beside gRPC's threads.
DRIVER = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "import sys; from scheduler_service.cli import children, main; "
    f"children.python_module = lambda *argv: (sys.executable, {str(FAKE_SERVICES)!r}, *argv); "
    "main()"
)


class Program:
    """A running program, whose output can be waited for."""

    def __init__(self, *arguments: str, tty: bool = False, **environment: str) -> None:
        self.output = ""
        if tty:
            self._reader, child_end = pty.openpty()
            self._writer = os.dup(self._reader)
            ends = {"stdin": child_end, "stdout": child_end, "stderr": child_end}
        else:
            self._reader, child_end = os.pipe()
            child_input, self._writer = os.pipe()
            ends = {"stdin": child_input, "stdout": child_end, "stderr": child_end}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
            **ends,  # type: ignore[call-overload]  # file descriptors
        )
        for end in set(ends.values()):
            os.close(end)

    def wait_for(self, text: str) -> None:
        """Read until a text was printed."""
        while text not in self.output:
            assert self.read(), f"{text!r} is not in {self.output!r}"

    def type(self, text: str) -> None:
        """Write to standard input."""
        self.type_bytes(text.encode())

    def type_bytes(self, data: bytes) -> None:
        """Write to standard input, whatever it is."""
        os.write(self._writer, data)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone."""
        self.process.send_signal(number)

    def finish(self) -> int:
        """Read to the end and return the exit code."""
        while self.read():
            pass
        return self.process.wait(timeout=60)

    def close(self) -> None:
        """End the program, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for end in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(end)

    def read(self) -> bool:
        """Read what there is, after waiting for it; return False at the end."""
        try:
            data = os.read(self._reader, 65_536)
        except OSError:  # a terminal whose other end is closed
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def program(*arguments: str, tty: bool = False, **environment: str) -> Iterator[Program]:
    """Run the program for the length of a test."""
    running = Program(*arguments, tty=tty, **environment)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="isobatch-") as directory:
        yield Path(directory)


def test_ctrl_c_ends_generate_with_its_own_code(fake: FakeScheduler) -> None:
    """Exit code 5, what came is kept, and the server is told."""
    fake.script = fake_scheduler.endless
    with program("generate", "-p", "x", "--address", fake.address) as running:
        running.wait_for("w0 w1 ")
        running.signal(signal.SIGINT)
        assert running.finish() == 5
        assert running.output == "w0 w1 \nisobatch: interrupted\n"
    assert fake.ended.acquire(timeout=60)


def test_ctrl_c_stops_the_answer_of_chat_and_not_the_program(fake: FakeScheduler) -> None:
    """The half answer stays in the conversation."""
    fake.script = fake_scheduler.endless
    with program("chat", "--address", fake.address) as running:
        running.type("one\n")
        running.wait_for("w0 w1 ")
        running.signal(signal.SIGINT)
        assert fake.ended.acquire(timeout=60)
        fake.script = fake_scheduler.answer
        running.type("two\n")
        running.wait_for("w4 ")
        running.type("/exit\n")
        assert running.finish() == 0
    said = [turn.content for turn in fake.requests[-1].chat.messages]
    assert said == ["one", "w0 w1 ", "two"]


def test_chat_on_a_terminal_keeps_a_private_history(fake: FakeScheduler, tmp_path: Path) -> None:
    """Line editing works, and others on this machine cannot read what was asked."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with program("chat", "--address", fake.address, tty=True, **environment) as running:
        running.wait_for(">")
        running.type("hello\r")
        running.wait_for("w4 ")
        running.type("/exit\r")
        assert running.finish() == 0
    (history,) = tmp_path.rglob("chat_history")
    assert "+hello\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_terminal_gets_statistics_and_no_control_characters(fake: FakeScheduler) -> None:
    """A model cannot recolour or rename the terminal; a line about the answer follows."""

    def answer_with_escape(request: object, context: object) -> Iterator[object]:
        yield fake_scheduler.accepted(request)  # type: ignore[arg-type]
        response = fake_scheduler.delta(0)
        response.delta.text = "\x1b[31mred\x07\n\ttab"
        yield response
        yield fake_scheduler.finished(1, sampling_pb2.FINISH_REASON_STOP)

    fake.script = answer_with_escape  # type: ignore[assignment]
    with program("generate", "-p", "x", "--address", fake.address, tty=True) as running:
        assert running.finish() == 0
    assert running.output.startswith("[31mred\r\n\ttab\r\n3 prompt tokens")


def test_private_pair_answers_and_leaves_nothing(runtime: Path) -> None:
    """`generate --serve` starts both services, asks, and tidies up."""
    arguments = ("generate", "--serve", "-p", "x", "--threads", "2", "--kv-memory-mb", "64")
    with program(*arguments, "--json", TMPDIR=str(runtime)) as running:
        assert running.finish() == 0
    progress, answer = running.output.splitlines()
    assert progress == "pulling smollm2-135m-instruct"
    assert json.loads(answer)["text"] == "w0 w1 w2 w3 w4 "
    assert list(runtime.iterdir()) == []


def test_private_pair_that_cannot_start_shows_why(runtime: Path) -> None:
    """A configuration error of the executor is the program's own, and said once."""
    arguments = ("generate", "--serve", "-p", "x", "--model", "missing")
    with program(*arguments, TMPDIR=str(runtime)) as running:
        assert running.finish() == 78
    assert running.output == "isobatch: [executor] a model must exist, got missing\n"
    assert list(runtime.iterdir()) == []


def test_private_pair_that_crashes_is_unavailable(runtime: Path) -> None:
    """After a few attempts the traceback of the last one is shown."""
    arguments = ("generate", "--serve", "-p", "x", "--model", "crash")
    with program(*arguments, TMPDIR=str(runtime)) as running:
        assert running.finish() == 3
    assert running.output.count("executor | RuntimeError: crashed on purpose") == 1
    assert running.output.count("ended with") == 0
    assert "[supervisor] executor must keep running, got exit code 1" in running.output


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("[model] the file must exist, got x", "[model] the file must exist, got x"),
        ("2026-01-01 error cannot start error=[gguf] a b", "[gguf] a b"),
        ('{"event": "cannot start", "error": "[gguf] a b"}', "[gguf] a b"),
        ('{"event": "serving"}', ""),
        ("12", ""),
        ("Traceback", ""),
    ],
)
def test_the_error_in_a_line(line: str, error: str) -> None:
    """However a service's log is written."""
    assert error_in(line) == error


def test_ctrl_c_while_a_private_pair_loads(runtime: Path) -> None:
    """Nobody has to wait for a model that loads for ever."""
    arguments = ("generate", "--serve", "-p", "x", "--model", "slow")
    with program(*arguments, TMPDIR=str(runtime)) as running:
        give_up_at = time.monotonic() + 60
        while not list(runtime.rglob("scheduler.sock")):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        running.signal(signal.SIGINT)
        assert running.finish() == 5
    assert running.output == "isobatch: interrupted\n"
    assert list(runtime.iterdir()) == []


def test_sigterm_tidies_up_a_private_pair(runtime: Path) -> None:
    """`chat --serve` ends with its children, and SIGTERM is not mistaken for Ctrl-C."""
    with program("chat", "--serve", TMPDIR=str(runtime)) as running:
        running.wait_for("/exit ends")
        assert list(runtime.iterdir()) != []
        running.signal(signal.SIGTERM)
        assert running.finish() == 5
    assert list(runtime.iterdir()) == []


def test_chat_leaves_a_line_out_that_is_no_text(fake: FakeScheduler) -> None:
    """It is named, not guessed at, and the conversation goes on."""
    with program("chat", "-n", "1", "--address", fake.address) as running:
        running.wait_for("/exit ends")
        running.type_bytes(b"\xff\xfe\nhi\n/exit\n")
        assert running.finish() == 0
    assert "A line must be UTF-8; this one was left out.\nw0" in running.output


def test_serve_runs_both_until_ctrl_c(runtime: Path) -> None:
    """Lines carry names, readiness is announced, and the scheduler ends first."""
    with program("serve", "--metrics-port", "0", XDG_RUNTIME_DIR=str(runtime)) as running:
        running.wait_for("isobatch serves on unix:")
        directory = runtime / "isobatch"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert (directory / "scheduler.sock").exists()
        running.signal(signal.SIGINT)
        assert running.finish() == 0
    lines = running.output.splitlines()
    assert "executor  | executor up: smollm2-135m-instruct None None" in lines
    assert lines.index("scheduler | scheduler goodbye") < lines.index(
        "executor  | executor goodbye"
    )


def test_serve_says_what_it_waits_for(runtime: Path) -> None:
    """Once, and a second Ctrl-C ends it."""
    with program(
        "serve", "--metrics-port", "0", XDG_RUNTIME_DIR=str(runtime), FAKE_ENDLESS_DRAIN="1"
    ) as running:
        running.wait_for("isobatch serves on unix:")
        running.signal(signal.SIGINT)
        words = "3 requests are being finished; a second Ctrl-C ends at once\n"
        running.wait_for(words)
        running.signal(signal.SIGINT)
        assert running.finish() == 0
    assert running.output.count(words) == 1
    assert "did not end within" not in running.output


def test_serve_heeds_the_configuration_file(runtime: Path) -> None:
    """The model and the address are what the command itself must know."""
    config = runtime / "config.toml"
    address = f"unix:{runtime}/own.sock"
    config.write_text(f'[scheduler]\nlisten = "{address}"\n[executor]\nmodel = "mine"\n')
    with program("serve", XDG_RUNTIME_DIR=str(runtime), ISOBATCH_CONFIG=str(config)) as running:
        running.wait_for(f"isobatch serves on {address}")
        running.signal(signal.SIGINT)
        assert running.finish() == 0
    assert "executor  | executor up: mine None None" in running.output
    config.write_text("[model]\n")
    with program("serve", XDG_RUNTIME_DIR=str(runtime), ISOBATCH_CONFIG=str(config)) as running:
        assert running.finish() == 78
    assert "a table must be a known one, got model" in running.output


def test_serve_starts_a_dead_executor_again(runtime: Path) -> None:
    """kill -9 of the executor is mended."""
    arguments = ("serve", "--model", "m", "--threads", "3", "--kv-memory-mb", "5")
    with program(*arguments, XDG_RUNTIME_DIR=str(runtime)) as running:
        running.wait_for("isobatch serves on unix:")
        running.wait_for("executor up: m 5 3")
        (pid,) = re.findall(r"executor pid (\d+)", running.output)
        os.kill(int(pid), signal.SIGKILL)
        running.wait_for("executor  | ended with SIGKILL; starting it again")
        while running.output.count("executor up: m 5 3") < 2:
            assert running.read()
        running.signal(signal.SIGTERM)
        assert running.finish() == 0


def test_serve_passes_on_who_drafts(runtime: Path) -> None:
    arguments = ("serve", "--speculation", "auto", "--draft-model", "small")
    with program(*arguments, XDG_RUNTIME_DIR=str(runtime)) as running:
        running.wait_for("isobatch serves on unix:")
        running.signal(signal.SIGTERM)
        assert running.finish() == 0
    assert "scheduler | scheduler speculates by auto" in running.output
    assert "executor  | executor drafts with small" in running.output


def test_serve_refuses_a_taken_socket(runtime: Path) -> None:
    """A second server must not push the first aside."""
    path = runtime / "s.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        arguments = ("serve", "--listen", f"unix:{path}")
        with program(*arguments, XDG_RUNTIME_DIR=str(runtime)) as running:
            assert running.finish() == 78
    assert f"got a server that answers on {path}" in running.output


def test_serve_passes_a_configuration_error_on(runtime: Path) -> None:
    """launchd and scripts see 78 and do not try again."""
    with program("serve", "--model", "missing", XDG_RUNTIME_DIR=str(runtime)) as running:
        assert running.finish() == 78
    assert "executor  | [executor] a model must exist, got missing" in running.output


def test_pull_prints_the_path() -> None:
    """The last line of the child is the path, spaces and all; its progress passes by."""
    with program("pull", "toy") as running:
        assert running.finish() == 0
    assert running.output == "pulling toy\n/models/toy v1.gguf\n"
    with program("pull", "toy", "--json") as running:
        assert running.finish() == 0
    assert json.loads(running.output.splitlines()[1]) == {
        "model": "toy",
        "path": "/models/toy v1.gguf",
    }


def test_pull_failure_keeps_the_exit_code() -> None:
    """What the child found wrong is the program's answer."""
    with program("pull", "missing") as running:
        assert running.finish() == 78
    assert re.search(r"\[pull\] bringing missing must succeed, got exit code 78", running.output)


def test_children_run_outside_the_current_directory(tmp_path: Path) -> None:
    """A file named like a library, where the user happens to be, breaks no service."""
    from scheduler_service.cli import children

    (tmp_path / "platform.py").write_text("raise RuntimeError")
    command = children.python_module("platform")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
