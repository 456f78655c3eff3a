"""Runs child processes: collects their output, restarts the ones that die, stops them in order.

Standard library only, so that children start before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final

from scheduler_service import supervised
from scheduler_service.cli.last_words import error_in

# Takes the name of a child and one line, of its output or about it.
LineSink = Callable[[str, str], None]

POLL_SECONDS: Final = 0.05
_LINE_LIMIT_BYTES: Final = 65_536
_EXIT_CONFIGURATION: Final = 78
_LAST_WORDS_SECONDS: Final = 1.0

# Ends a child's process group when the supervisor is gone, even by SIGKILL: only the supervisor
# holds the other end of this script's standard input. (dash knows groups only in this spelling.)
_WATCHDOG: Final = 'read -r line; kill -s TERM -- "-$1"'
# A child begins once its watchdog is there; a supervisor killed before that never lets it begin.
_GATE: Final = 'read -r go && exec "$@" </dev/null'
_HEARING_GATE: Final = 'read -r go && exec "$@"'
# Signals that come from outside: what a process wrote before them says nothing about its end.
_OUTSIDE: Final = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run.

    One that `hears_failures` gets a line on its standard input for a child that is given up, and
    the variable of `scheduler_service.supervised`.
    """

    name: str
    argv: tuple[str, ...]
    hears_failures: bool = False


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child that died is started again.

    A child that ran for `quick_seconds` starts a new series; within a series the delay doubles from
    `first_delay_seconds` to `max_delay_seconds`, and after `max_quick_deaths` it is given up.
    """

    max_quick_deaths: int = 5
    quick_seconds: float = 5.0
    first_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0

    def delay(self, quick_deaths: int) -> float | None:
        """Return the seconds to wait after so many quick deaths in a row, or None to give up."""
        if quick_deaths > self.max_quick_deaths:
            return None
        doubled = self.first_delay_seconds * 2.0 ** max(0, quick_deaths - 1)
        return min(doubled, self.max_delay_seconds)


@dataclass(frozen=True, slots=True)
class ChildFailure:
    """A child that was given up."""

    name: str
    returncode: int  # negative: the signal that ended it
    num_quick_deaths: int = 0  # in a row, this one included
    last_words: str = ""  # the last line that it wrote

    def __str__(self) -> str:
        text = f"[supervisor] {self.name} must keep running, got {describe_exit(self.returncode)}"
        if self.num_quick_deaths > 1 and self.returncode != _EXIT_CONFIGURATION:
            text += f" ({self.num_quick_deaths} quick deaths in a row)"
        return text

    def whole_story(self) -> str:
        """Return the failure in one line for somebody who did not see the child's output."""
        if not self.last_words or self.returncode in _OUTSIDE:
            return str(self)
        return f"{self}; its last words: {error_in(self.last_words) or self.last_words}"


@dataclass(slots=True, eq=False)
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    watchdog: subprocess.Popen[bytes]
    reader: threading.Thread
    started_at: float
    last_words: list[str]  # the last line of its output, once there is one
    quick_deaths: int = 0
    restart_at: float | None = None  # when to start it again; None while it runs


def describe_exit(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to a child's standard input, if it still reads."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Children under one supervisor. `run` watches them; `stop` and `kill` may come from elsewhere.

    Children get process groups of their own, so that Ctrl-C reaches them only through `stop`, in
    the order in which they were started.
    """

    def __init__(
        self,
        sink: LineSink,
        *,
        policy: RestartPolicy | None = None,
        grace_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._policy = policy or RestartPolicy()
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._running: list[_Running] = []
        self._lock = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._kill = threading.Event()
        self.failure: ChildFailure | None = None

    def start(self, child: Child) -> None:
        """Start a child and watch it from now on, unless `run` has returned already.

        Raises OSError when it cannot be started.
        """
        with self._lock:
            if not self._closed:
                self._running.append(self._spawn(child))

    def stop(self) -> None:
        """Ask `run` to end the children and return. Safe in a signal handler."""
        self._stop.set()

    def kill(self) -> None:
        """Like `stop`, without waiting for the children to finish what they do."""
        self._kill.set()
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once `stop` or `kill` was called."""
        return self._stop.is_set()

    def run(self) -> ChildFailure | None:
        """Watch the children until `stop`, or until one is given up; then end all of them.

        Returns the failure, or None after `stop`.
        """
        try:
            while not self._stop.is_set() and self.failure is None:
                self.check()
                self._stop.wait(POLL_SECONDS)
        finally:
            self._shut_down()
        return self.failure

    def check(self) -> None:
        """Look at every child once; start again the ones whose time has come."""
        now = self._clock()
        with self._lock:
            children = list(self._running)
        for running in children:
            if running.restart_at is None:
                self._note_death(running, now)
            elif now >= running.restart_at:
                self._restart(running)

    def _note_death(self, running: _Running, now: float) -> None:
        returncode = running.process.poll()
        if returncode is None:
            return
        self._reap(running)
        is_quick = now - running.started_at < self._policy.quick_seconds
        running.quick_deaths = running.quick_deaths + 1 if is_quick else 0
        delay = self._policy.delay(running.quick_deaths)
        how = describe_exit(returncode)
        if returncode == _EXIT_CONFIGURATION or delay is None:
            # A wrong configuration does not heal by itself.
            self._sink(running.child.name, f"ended with {how}")
            self.failure = ChildFailure(
                running.child.name,
                returncode,
                running.quick_deaths,
                "".join(running.last_words),
            )
            return
        self._sink(running.child.name, f"ended with {how}; starting it again in {delay:g} s")
        running.restart_at = now + delay

    def _restart(self, running: _Running) -> None:
        fresh = self._spawn(running.child)
        running.process, running.watchdog, running.reader, running.last_words = (
            fresh.process,
            fresh.watchdog,
            fresh.reader,
            fresh.last_words,
        )
        running.started_at = fresh.started_at
        running.restart_at = None

    def _spawn(self, child: Child) -> _Running:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if child.hears_failures:
            environment[supervised.VARIABLE] = "1"
        gate_script = _HEARING_GATE if child.hears_failures else _GATE
        process = subprocess.Popen(
            ("/bin/sh", "-c", gate_script, "gate", *child.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        watchdog = subprocess.Popen(
            ("/bin/sh", "-c", _WATCHDOG, "watchdog", str(process.pid)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        _tell(process, "go")
        if not child.hears_failures:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        last_words: list[str] = []
        reader = threading.Thread(
            target=self._read,
            args=(child.name, process.stdout, last_words),
            name=f"{child.name}-output",
        )
        reader.daemon = True
        reader.start()
        return _Running(child, process, watchdog, reader, self._clock(), last_words)

    def _read(self, name: str, stream: IO[bytes], last_words: list[str]) -> None:
        with stream:
            while data := stream.readline(_LINE_LIMIT_BYTES):
                line = data.decode(errors="replace").rstrip("\r\n")
                if line.strip():
                    last_words[:] = [line.strip()]
                self._sink(name, line)

    def _reap(self, running: _Running) -> None:
        """Tidy up after a child that has ended, and end what is left of its process group."""
        running.watchdog.kill()
        running.watchdog.communicate()
        if running.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                running.process.stdin.close()
        _kill_group(running.process)
        # Its output ends with it, unless something outside its group holds the pipe.
        running.reader.join(timeout=1.0)

    def _shut_down(self) -> None:
        """End the children one after the other, so that the first may finish with the second."""
        with self._lock:
            children, self._running = self._running, []
            self._closed = True
        if self.failure is not None:
            for running in children:
                if running.child.hears_failures and running.process.poll() is None:
                    _tell(running.process, self.failure.whole_story())
        for running in children:
            if running.restart_at is None:
                self._end(running)

    def _end(self, running: _Running) -> None:
        process = running.process
        process.terminate()
        give_up_at = self._clock() + self._grace_seconds
        while process.poll() is None and not self._kill.is_set():
            if self._clock() >= give_up_at:
                self._sink(running.child.name, f"did not end within {self._grace_seconds:g} s")
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        if self._kill.is_set() and process.poll() is None:
            # Told a second time, a service ends its answers at once, and says so.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_SECONDS)
        if process.poll() is None:
            _kill_group(process)
            process.wait()
        self._reap(running)
