"""A sample of the load's requests is traced, and run again alone when the load is over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from click.testing import CliRunner

from scheduler_service.cli import app

# Of one process that generates load.
MOST_TRACES: Final = 3
# Every so many requests of a stream.
_EVERY: Final = 3


class TraceSample:
    """Says which requests are traced, and keeps the traces of those that ended by themselves."""

    def __init__(self, folder: str) -> None:
        """Keep them in `folder`; none where it is empty."""
        self._folder = folder
        self._kept = 0

    def wants(self, stream: int, number: int) -> bool:
        """Whether to trace a stream's request."""
        is_room = bool(self._folder) and self._kept < MOST_TRACES
        return is_room and (stream + number) % _EVERY == 0

    def keep(self, trace: bytes, stream: int, number: int) -> None:
        """Keep a whole trace while there is room."""
        if trace and self._kept < MOST_TRACES:
            self._kept += 1
            name = f"{os.getpid()}-{stream}-{number}.isotrace"
            (Path(self._folder) / name).write_bytes(trace)


def replay_all(folder: Path, address: str) -> tuple[int, list[str]]:
    """Run every trace of a folder again; return how many there were and what was not equal."""
    found = []
    traces = sorted(folder.glob("*.isotrace"))
    for trace in traces:
        result = CliRunner().invoke(app.cli, ["replay", str(trace), "--address", address])
        if result.exit_code != 0:
            found.append(f"replay of {trace.name} ended with {result.exit_code}: {result.output}")
    return len(traces), found
