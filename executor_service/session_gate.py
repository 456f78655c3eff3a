"""Lets one session stream live at a time: a new one ends the old one."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from executor_service.errors import ExecutorError

# How long after its stream broke a scheduler is expected back; it tries again within a second.
RESUME_SECONDS: Final = 5.0


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
        self._left_at = -math.inf

    @property
    def is_taken(self) -> bool:
        """True while a stream is live, and shortly after one has ended by itself."""
        return self._live is not None or time.monotonic() - self._left_at < RESUME_SECONDS

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
            self._left_at = time.monotonic()

    def end(self, reason: ExecutorError) -> None:
        """End the live stream with `reason`, which its handler finds in `ended_by`."""
        if self._live is not None:
            self._live.ended_by = reason
            self._live.task.cancel()
            self._live = None
