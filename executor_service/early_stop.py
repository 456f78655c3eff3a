"""Signals that ask a service to stop while it is still importing what it runs on.

Imports nothing that takes time itself. Until the service hears signals by itself there is nothing
to finish: the process leaves at once, quietly, with the exit code of one that was stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_leaving() -> Iterator[None]:
    """Exit with 0 on SIGTERM and SIGINT, until somebody else handles them.

    Does nothing outside the main thread, which alone may set handlers.
    """

    def leave(number: int, frame: object) -> None:
        # An exception would have to pass through half-done imports, some of which catch it.
        os._exit(0)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, leave)
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
