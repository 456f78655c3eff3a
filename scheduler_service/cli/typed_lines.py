"""Lines of standard input that is no terminal, read so that a signal ends the wait for one."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_READ_BYTES: Final = 65_536


class TypedLines:
    """Lines of UTF-8 from a file descriptor.

    A signal that comes just before a plain read begins does not interrupt it: the handler would run
    when the next line comes, if ever. So signals are waited for together with the input.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def read_line(self) -> str:
        """Return the next line, without its end.

        Raises EOFError when there is none, UnicodeDecodeError for one that is no UTF-8 (the next
        call goes on after it), and what the handler of a signal raises.
        """
        with _signals() as signals:
            while b"\n" not in self._buffer:
                ready, _, _ = select.select([self._descriptor, signals], [], [])
                if signals in ready:
                    os.read(signals, _READ_BYTES)
                if self._descriptor not in ready:
                    continue
                data = os.read(self._descriptor, _READ_BYTES)
                if not data:
                    break
                self._buffer += data
        line, end, self._buffer = self._buffer.partition(b"\n")
        if not line and not end:
            raise EOFError
        return line.decode()


@contextmanager
def _signals() -> Iterator[int]:
    """Give a descriptor that can be read whenever a signal has come."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(former)
        os.close(reader)
        os.close(writer)
