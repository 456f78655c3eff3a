"""A scheduler and an executor for one command, in a directory of their own."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scheduler_service.cli import children
from scheduler_service.cli.failures import EXIT_CONFIGURATION, EXIT_UNAVAILABLE, Failure
from scheduler_service.cli.last_words import error_in
from scheduler_service.cli.options import EMBEDDED_MODEL
from scheduler_service.cli.output import progress
from scheduler_service.cli.readiness import wait_until_serving
from scheduler_service.cli.signals import leave, on_ending_signals
from scheduler_service.cli.supervisor import RestartPolicy, Supervisor
from scheduler_service.runtime_paths import (
    EXECUTOR_SOCKET_NAME,
    SCHEDULER_SOCKET_NAME,
    unix_address,
)

# Enough to hold a traceback and what led to it.
_KEPT_LINES: Final = 60
# The command has its answer or its error by then; nothing is left to finish.
_GRACE_SECONDS: Final = 3.0


@contextmanager
def private_pair(
    model: str, *, threads: int | None = None, kv_memory_mb: int | None = None
) -> Iterator[str]:
    """Start both services and give the scheduler's address once it serves.

    Raises Failure when one of them cannot start: with its own error, or else with the last lines of
    its output. A death later on is mended as in `serve`, and the answer goes on.
    """
    log: deque[tuple[str, str]] = deque(maxlen=_KEPT_LINES)
    supervisor = Supervisor(
        lambda name, line: log.append((name, line)),
        policy=RestartPolicy(max_quick_deaths=2),
        grace_seconds=_GRACE_SECONDS,
    )
    with (
        tempfile.TemporaryDirectory(prefix="isobatch-") as directory,
        on_ending_signals(leave),
    ):
        scheduler = unix_address(Path(directory) / SCHEDULER_SOCKET_NAME)
        executor = unix_address(Path(directory) / EXECUTOR_SOCKET_NAME)
        watcher = threading.Thread(target=supervisor.run, name="supervisor")
        try:
            # The scheduler needs no model to start, so it need not wait for one either.
            supervisor.start(
                children.scheduler_child(listen=scheduler, executor=executor, metrics_port=0)
            )
            watcher.start()
            if model == EMBEDDED_MODEL:
                children.pull(model)
            supervisor.start(
                children.executor_child(
                    model=model,
                    listen=executor,
                    metrics_port=0,
                    kv_memory_mb=kv_memory_mb,
                    threads=threads,
                )
            )
            with progress(f"loading {model}"):
                serves = wait_until_serving(scheduler, lambda: supervisor.failure is None)
            if not serves:
                raise start_failure(supervisor, watcher, log)
            yield scheduler
        finally:
            supervisor.stop()
            if watcher.ident is not None:
                watcher.join()


def start_failure(
    supervisor: Supervisor, watcher: threading.Thread, log: deque[tuple[str, str]]
) -> Failure:
    """Return the error of a child that could not start: its own, or else its last lines."""
    # The last words of a child may still be on their way.
    watcher.join()
    failure = supervisor.failure
    if failure is None:
        return Failure("\n".join(f"{name} | {line}" for name, line in log), EXIT_UNAVAILABLE)
    last_run = _last_run([line for name, line in log if name == failure.name])
    if failure.returncode != EXIT_CONFIGURATION:
        lines = [*(f"{failure.name} | {line}" for line in last_run), str(failure)]
        return Failure("\n".join(lines), EXIT_UNAVAILABLE)
    errors = [found for line in last_run if (found := error_in(line))]
    return Failure(
        errors[-1] if errors else "\n".join([*last_run, str(failure)]), failure.returncode
    )


def _last_run(lines: list[str]) -> list[str]:
    """Return what a child said in its last run: each run ends with the supervisor's remark."""
    ends = [index for index, line in enumerate(lines) if line.startswith("ended with ")]
    start = ends[-2] + 1 if len(ends) > 1 else 0
    return lines[start : ends[-1] if ends else None]
