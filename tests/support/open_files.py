"""What this process holds open, for tests that nothing stays open behind what they call."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FOLDER = Path("/proc/self/fd")


def open_files() -> set[tuple[str, str]]:
    """The number and the target of each open file; empty where the system has no such list.

    Compare what is new, never the count: a file of an earlier test may be closed by the
    garbage collector at any time.
    """
    found: set[tuple[str, str]] = set()
    if not _FOLDER.is_dir():
        return found
    for number in os.listdir(_FOLDER):
        # The listing's own handle is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(_FOLDER / number)))
    return found
