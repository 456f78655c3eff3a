"""Several executors of one model for one command, each with flags of its own."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scheduler_service.cli import children
from scheduler_service.cli.options import EMBEDDED_MODEL
from scheduler_service.cli.private_pair import start_failure
from scheduler_service.cli.signals import leave, on_ending_signals
from scheduler_service.cli.supervisor import RestartPolicy, Supervisor
from scheduler_service.runtime_paths import unix_address

_KEPT_LINES: Final = 60
_GRACE_SECONDS: Final = 3.0


@contextmanager
def private_executors(
    model: str,
    flags: Mapping[str, Sequence[str]],
    *,
    threads: int | None = None,
    kv_memory_mb: int | None = None,
) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Start one executor for each name in `flags`.

    Gives their addresses by name, and a function that raises Failure, with the executor's own
    error, once one of them has failed for good. They may still be loading.
    """
    log: deque[tuple[str, str]] = deque(maxlen=_KEPT_LINES)
    supervisor = Supervisor(
        lambda name, line: log.append((name, line)),
        policy=RestartPolicy(max_quick_deaths=1),
        grace_seconds=_GRACE_SECONDS,
    )
    watcher = threading.Thread(target=supervisor.run, name="supervisor")

    def check() -> None:
        if supervisor.failure is not None:
            raise start_failure(supervisor, watcher, log)

    with (
        tempfile.TemporaryDirectory(prefix="isobatch-") as directory,
        on_ending_signals(leave),
    ):
        addresses = {name: unix_address(Path(directory) / f"{name}.sock") for name in flags}
        try:
            watcher.start()
            if model == EMBEDDED_MODEL:
                children.pull(model)
            for name, address in addresses.items():
                supervisor.start(
                    children.executor_child(
                        model=model,
                        listen=address,
                        metrics_port=0,
                        kv_memory_mb=kv_memory_mb,
                        threads=threads,
                        more=flags[name],
                        name=name,
                    )
                )
            yield addresses, check
        finally:
            supervisor.stop()
            if watcher.ident is not None:
                watcher.join()
