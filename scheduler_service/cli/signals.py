"""What the signals that end a program do while it owns child processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from scheduler_service.cli.failures import EXIT_INTERRUPTED

# SIGHUP comes when the terminal is closed.
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_ending_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with each signal that asks the program to end, within this context."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def leave(number: int) -> None:
    """Leave by an exception, so that everything is tidied up on the way.

    Ctrl-C may be caught and mean less than the end of the program; the other signals may not.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_INTERRUPTED)
