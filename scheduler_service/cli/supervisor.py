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

# Takes the name of a child and one line, of its output or about it.
LineSink = Callable[[str, str], None]

POLL_SECONDS: Final = 0.05
_LINE_LIMIT_BYTES: Final = 65_536
_EXIT_CONFIGURATION: Final = 78

# Ends a child's process group when the supervisor is gone, even by SIGKILL: only the supervisor
# holds the other end of this script's standard input. (dash knows groups only in this spelling.)
_WATCHDOG: Final = 'read -r line; kill -s TERM -- "-$1"'
# A child begins once its watchdog is there; a supervisor killed before that never lets it begin.
_GATE: Final = 'read -r go && exec "$@" </dev/null'


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run."""

    name: str
    argv: tuple[str, ...]


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

    def __str__(self) -> str:
        return f"[supervisor] {self.name} must keep running, got {describe_exit(self.returncode)}"


@dataclass(slots=True, eq=False)
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    watchdog: subprocess.Popen[bytes]
    reader: threading.Thread
    started_at: float
    quick_deaths: int = 0
    restart_at: float | None = None  # when to start it again; None while it runs


def describe_exit(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


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
            self.failure = ChildFailure(running.child.name, returncode)
            return
        self._sink(running.child.name, f"ended with {how}; starting it again in {delay:g} s")
        running.restart_at = now + delay

    def _restart(self, running: _Running) -> None:
        fresh = self._spawn(running.child)
        running.process, running.watchdog, running.reader = (
            fresh.process,
            fresh.watchdog,
            fresh.reader,
        )
        running.started_at = fresh.started_at
        running.restart_at = None

    def _spawn(self, child: Child) -> _Running:
        process = subprocess.Popen(
            ("/bin/sh", "-c", _GATE, "gate", *child.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
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
        with contextlib.suppress(BrokenPipeError), process.stdin as gate:
            gate.write(b"go\n")
        reader = threading.Thread(
            target=self._read, args=(child.name, process.stdout), name=f"{child.name}-output"
        )
        reader.daemon = True
        reader.start()
        return _Running(child, process, watchdog, reader, self._clock())

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(_LINE_LIMIT_BYTES):
                self._sink(name, line.decode(errors="replace").rstrip("\r\n"))

    def _reap(self, running: _Running) -> None:
        """Tidy up after a child that has ended, and end what is left of its process group."""
        running.watchdog.kill()
        running.watchdog.communicate()
        _kill_group(running.process)
        # Its output ends with it, unless something outside its group holds the pipe.
        running.reader.join(timeout=1.0)

    def _shut_down(self) -> None:
        """End the children one after the other, so that the first may finish with the second."""
        with self._lock:
            children, self._running = self._running, []
            self._closed = True
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
        if process.poll() is None:
            _kill_group(process)
            process.wait()
        self._reap(running)
