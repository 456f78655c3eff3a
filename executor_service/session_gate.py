"""Lets one session stream live at a time: a new one ends the old one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor_service.errors import ExecutorError


@dataclass(slots=True, eq=False)
class LiveStream:
    """A stream's handler, and why it was told to end."""

    task: asyncio.Task[object]
    ended_by: ExecutorError | None = None
    last_request: float = field(default_factory=time.monotonic)  # seconds


class SessionGate:
    """Knows the live stream. All methods are called on the event loop."""

    def __init__(self) -> None:
        self._live: LiveStream | None = None

    @property
    def live(self) -> LiveStream | None:
        """The live stream, if there is one."""
        return self._live

    def enter(self, reason: ExecutorError) -> LiveStream:
        """Make the calling task the live stream; the one before it is ended with `reason`."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("[session_gate] a stream must run in a task")
        self.end(reason)
        self._live = LiveStream(task)
        return self._live

    def leave(self, stream: LiveStream) -> None:
        """Forget a stream that has ended."""
        if self._live is stream:
            self._live = None

    def end(self, reason: ExecutorError) -> None:
        """End the live stream with `reason`, which its handler finds in `ended_by`."""
        if self._live is not None:
            self._live.ended_by = reason
            self._live.task.cancel()
            self._live = None
