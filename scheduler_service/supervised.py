"""What a supervisor tells the scheduler: that its executor is given up, and why.

A supervisor that starts the scheduler sets the variable ISOBATCH_SUPERVISED and writes one line to
the scheduler's standard input for each executor that it will not start again. Standard library
only, because supervisors read the name of the variable here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

VARIABLE: Final = "ISOBATCH_SUPERVISED"
_STDIN: Final = 0
_PIECE_BYTES: Final = 4096


@contextlib.contextmanager
def hearing(on_line: Callable[[str], None], environ: Mapping[str, str]) -> Iterator[None]:
    """Call `on_line` with each line of the supervisor, on the running event loop.

    Does nothing without a supervisor, or where standard input is no pipe.
    """
    import asyncio  # here, because supervisors need none of it, and start their children first

    loop = asyncio.get_running_loop()
    data = bytearray()

    def read() -> None:
        piece = os.read(_STDIN, _PIECE_BYTES)
        if not piece:
            loop.remove_reader(_STDIN)
        data.extend(piece)
        *lines, rest = data.split(b"\n")
        data[:] = rest
        for line in lines:
            on_line(line.decode(errors="replace"))

    if VARIABLE in environ:
        # A file, say, cannot be waited for.
        with contextlib.suppress(OSError):
            loop.add_reader(_STDIN, read)
    try:
        yield
    finally:
        loop.remove_reader(_STDIN)
