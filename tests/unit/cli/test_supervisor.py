"""The supervisor with tiny shell programs in place of services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.cli.supervisor import (
    Child,
    ChildFailure,
    RestartPolicy,
    Supervisor,
    describe_exit,
)

FAST = RestartPolicy(max_quick_deaths=2, first_delay_seconds=0.01, max_delay_seconds=0.02)

# Runs until SIGTERM, then says so. `sleep & wait` lets the shell hear the signal at once.
STEADY = "trap 'echo goodbye; exit 0' TERM; echo up; while :; do sleep 0.2 & wait $!; done"


class Lines:
    """Collects what the supervisor says; `wait` blocks until a line is there."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, line: str) -> None:
        with self._changed:
            self.all.append((name, line))
            self._changed.notify_all()

    def wait(self, name: str, text: str, count: int = 1) -> None:
        """Wait until `count` lines of a child hold a text."""

        def is_there() -> bool:
            return sum(1 for who, line in self.all if who == name and text in line) >= count

        with self._changed:
            assert self._changed.wait_for(is_there, timeout=60), self.all


def shell(name: str, script: str, *arguments: str) -> Child:
    """Return a child that runs a shell script."""
    return Child(name, ("/bin/sh", "-c", script, name, *arguments))


@contextmanager
def watched(supervisor: Supervisor) -> Iterator[None]:
    """Run the supervisor in a thread, and end it."""
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield
    finally:
        supervisor.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_output_is_passed_on_by_name_and_line() -> None:
    """Standard output and standard error both, whatever bytes they hold."""
    lines = Lines()
    supervisor = Supervisor(lines)
    supervisor.start(shell("a", "printf 'one\\ntwo\\377\\n'; echo three >&2; " + STEADY))
    with watched(supervisor):
        lines.wait("a", "up")
    assert lines.all == [
        ("a", "one"),
        ("a", "two\ufffd"),
        ("a", "three"),
        ("a", "up"),
        ("a", "goodbye"),
    ]


def test_killed_child_is_started_again() -> None:
    """kill -9 of a service is mended, and the other child is left alone."""
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST)
    supervisor.start(shell("scheduler", STEADY))
    supervisor.start(shell("executor", "echo pid $$; " + STEADY))
    with watched(supervisor):
        lines.wait("executor", "up")
        pid = next(int(line.split()[1]) for _, line in lines.all if line.startswith("pid"))
        os.kill(pid, signal.SIGKILL)
        lines.wait("executor", "up", count=2)
    assert ("executor", "ended with SIGKILL; starting it again in 0.01 s") in lines.all
    assert sum(1 for name, line in lines.all if (name, line) == ("scheduler", "up")) == 1
    assert supervisor.failure is None


def test_child_that_keeps_dying_is_given_up() -> None:
    """After the allowed quick deaths everything ends, and the failure says why."""
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST)
    supervisor.start(shell("steady", STEADY))
    lines.wait("steady", "up")
    supervisor.start(shell("broken", "echo try; exit 3"))
    assert supervisor.run() == ChildFailure("broken", 3, num_quick_deaths=3, last_words="try")
    said = "[supervisor] broken must keep running, got exit code 3 (3 quick deaths in a row)"
    assert str(supervisor.failure) == said
    assert sum(1 for name, line in lines.all if (name, line) == ("broken", "try")) == 3
    assert ("steady", "goodbye") in lines.all


def test_configuration_error_is_not_tried_again() -> None:
    """Exit code 78 does not heal by itself."""
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST)
    supervisor.start(shell("executor", "echo no such model; exit 78"))
    failure = supervisor.run()
    assert failure == ChildFailure("executor", 78, num_quick_deaths=1, last_words="no such model")
    assert lines.all == [("executor", "no such model"), ("executor", "ended with exit code 78")]


def test_a_child_that_hears_failures_is_told_before_it_ends() -> None:
    """In one line, with the last words of the one that is given up; others have no input."""
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST)
    hear = 'trap "" TERM; echo "up $ISOBATCH_SUPERVISED"; read -r line; echo "heard $line"'
    supervisor.start(Child("scheduler", ("/bin/sh", "-c", hear), hears_failures=True))
    lines.wait("scheduler", "up 1")
    supervisor.start(shell("other", 'read -r x || echo "no input $ISOBATCH_SUPERVISED"; ' + STEADY))
    lines.wait("other", "no input")
    supervisor.start(shell("executor", "echo loading; echo 'error=[model] gone'; echo; exit 78"))
    supervisor.run()
    told = "executor must keep running, got exit code 78; its last words: [model] gone"
    assert ("scheduler", f"heard [supervisor] {told}") in lines.all
    assert ("other", "no input ") in lines.all


def test_a_child_that_hears_failures_may_be_the_one_that_fails() -> None:
    """Nobody is told then, neither at its end nor while it waits to be started again."""
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST)
    supervisor.start(Child("scheduler", ("/bin/sh", "-c", "exit 78"), hears_failures=True))
    assert supervisor.run() == ChildFailure("scheduler", 78, num_quick_deaths=1)
    supervisor = Supervisor(lines, policy=RestartPolicy(first_delay_seconds=60))
    supervisor.start(Child("scheduler", ("/bin/sh", "-c", "exit 1"), hears_failures=True))
    while not supervisor._running[0].restart_at:
        supervisor.check()
    supervisor.start(shell("executor", "exit 78"))
    failure = supervisor.run()
    assert failure is not None
    assert failure.name == "executor"


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (1, "got exit code 1; its last words: RuntimeError: x"),
        (-11, "got SIGSEGV; its last words: RuntimeError: x"),
        # Somebody else ended it, whatever it said before.
        (-9, "got SIGKILL"),
    ],
)
def test_last_words_count_where_they_may_say_something(returncode: int, words: str) -> None:
    failure = ChildFailure("executor", returncode, 1, "RuntimeError: x")
    assert failure.whole_story() == f"[supervisor] executor must keep running, {words}"


def test_first_child_ends_before_the_second_is_told() -> None:
    """The scheduler drains while its executor still computes."""
    lines = Lines()
    supervisor = Supervisor(lines)
    drain = "trap 'echo draining; sleep 0.2; echo drained; exit 0' TERM; echo up; "
    wait = "while :; do sleep 0.2 & wait $!; done"
    supervisor.start(shell("scheduler", drain + wait))
    supervisor.start(shell("executor", STEADY))
    with watched(supervisor):
        lines.wait("scheduler", "up")
        lines.wait("executor", "up")
    said = [line for _, line in lines.all if line != "up"]
    assert said == ["draining", "drained", "goodbye"]


def test_stubborn_child_is_killed_after_the_grace() -> None:
    """A service that ignores SIGTERM does not hold the program for ever."""
    lines = Lines()
    supervisor = Supervisor(lines, grace_seconds=0.2)
    supervisor.start(shell("a", "trap '' TERM; echo up; while :; do sleep 10; done"))
    lines.wait("a", "up")
    begin = time.monotonic()
    with watched(supervisor):
        pass
    assert 0.2 <= time.monotonic() - begin < 5
    assert ("a", "did not end within 0.2 s") in lines.all


def test_kill_does_not_wait_for_the_grace() -> None:
    """The second Ctrl-C means now."""
    lines = Lines()
    supervisor = Supervisor(lines, grace_seconds=60)
    supervisor.start(shell("a", "trap 'echo busy' TERM; echo up; while :; do sleep 0.05; done"))
    lines.wait("a", "up")
    begin = time.monotonic()
    with watched(supervisor):
        supervisor.stop()
        lines.wait("a", "busy")
        supervisor.kill()
    assert time.monotonic() - begin < 10


def test_kill_tells_a_child_again_before_it_ends_it() -> None:
    """A service that is told twice gives its answers up with a word to their clients."""
    lines = Lines()
    supervisor = Supervisor(lines, grace_seconds=60)
    first = "trap 'trap \"echo again; exit 0\" TERM; echo busy' TERM; "
    supervisor.start(shell("a", first + "echo up; while :; do sleep 0.05; done"))
    lines.wait("a", "up")
    with watched(supervisor):
        supervisor.stop()
        lines.wait("a", "busy")
        supervisor.kill()
    assert lines.all[-1] == ("a", "again")


def test_no_child_starts_after_the_end() -> None:
    """A start that comes too late must not leave a process behind."""
    lines = Lines()
    supervisor = Supervisor(lines)
    supervisor.stop()
    supervisor.run()
    supervisor.start(shell("late", "echo late"))
    time.sleep(0.1)
    assert lines.all == []


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """Even SIGKILL of the supervisor leaves no service behind."""
    marks = tmp_path / "marks"
    script = (
        "import sys; from scheduler_service.cli.supervisor import Child, Supervisor; "
        "s = Supervisor(lambda name, line: None); "
        "s.start(Child('a', ('/bin/sh', '-c', sys.argv[1], 'a', sys.argv[2]))); s.run()"
    )
    # The shell's own remarks would end it early, once nobody reads its output.
    child = (
        "exec 2>/dev/null; "
        'trap \'echo ended >> "$1"; exit 0\' TERM; echo up >> "$1"; '
        "while :; do sleep 0.2 & wait $!; done"
    )
    with subprocess.Popen([sys.executable, "-c", script, child, str(marks)]) as supervisor:
        eventually(lambda: marks.exists() and marks.read_text() == "up\n")
        supervisor.kill()
    eventually(lambda: marks.read_text() == "up\nended\n")


def test_a_child_without_a_watchdog_never_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that is killed between the two leaves nothing behind."""
    marks = tmp_path / "marks"
    real = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **options: Any) -> Any:
        if started:
            raise KeyboardInterrupt  # stands for the end of the supervisor
        started.append(real(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        Supervisor(Lines()).start(shell("a", 'echo up >> "$1"; sleep 60', str(marks)))
    monkeypatch.undo()
    with started[0] as child:
        child.communicate(timeout=60)
        assert child.returncode != 0
    assert not marks.exists()


def test_delays_double_up_to_a_limit() -> None:
    """The series of the documented policy."""
    policy = RestartPolicy(
        max_quick_deaths=4, first_delay_seconds=0.5, max_delay_seconds=1.5, quick_seconds=1
    )
    assert [policy.delay(deaths) for deaths in range(6)] == [0.5, 0.5, 1.0, 1.5, 1.5, None]


def test_long_life_starts_a_new_series() -> None:
    """Deaths far apart are not counted together."""
    now = 0.0
    lines = Lines()
    supervisor = Supervisor(lines, policy=FAST, clock=lambda: now)
    supervisor.start(shell("a", "exit 1"))
    for _ in range(5):
        eventually(lambda: _has_ended(supervisor))
        now += 10.0  # it ran for ten seconds, by this clock
        supervisor.check()
        now += 1.0
        supervisor.check()
    assert supervisor.failure is None
    assert len(lines.all) == 5
    supervisor.stop()
    supervisor.run()


def _has_ended(supervisor: Supervisor) -> bool:
    return supervisor._running[0].process.poll() is not None


@pytest.mark.parametrize(
    ("returncode", "words"), [(0, "exit code 0"), (-9, "SIGKILL"), (-200, "signal 200")]
)
def test_how_a_process_ended_in_words(returncode: int, words: str) -> None:
    """Negative return codes are signals."""
    assert describe_exit(returncode) == words
