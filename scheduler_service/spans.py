"""Spans of requests and steps, where somebody asked for them.

What the rest of the process knows of tracing is this interface. OpenTelemetry itself is an extra
(`isobatch[otel]`), and `otel.py`, the one module that imports it, is loaded only when it is asked
for (`span_setup.py`). Nobody asked: there is no object, and the step loop pays for one comparison
with None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler_service.core import TokenRowBatch
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.streams import TokenStream

Metadata = Sequence[tuple[str, str | bytes]]
"""A call's metadata as gRPC gives it."""


class Spans(Protocol):
    """Takes notes of requests and steps. Never holds text or token ids."""

    def begin(
        self, stream: TokenStream, metadata: Metadata, numeric_class: str
    ) -> Callable[[], None]:
        """Begin the span of a request that was just queued; return what ends it.

        A `traceparent` in the metadata is its parent.
        """
        ...

    def refuse(self, metadata: Metadata, arrival: float, model: str, reason: str) -> None:
        """Make the span of a request that was refused; `arrival` in monotonic seconds."""
        ...

    def step(self, batch: TokenRowBatch, times: PhaseTimes, executor_seconds: float) -> None:
        """Make the span of a step, if it is one of those to keep, with links to its requests."""
        ...

    def close(self) -> None:
        """Send what is left; takes seconds when nobody answers."""
        ...
