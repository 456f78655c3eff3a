"""Reads the lines that services write, for the error that one of them ended with."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Final

# Every error names what it is about in brackets.
_ERROR: Final = re.compile(r"\[[a-z][a-z0-9_]*\] .+")


def error_in(line: str) -> str:
    """Return the error in a line of a service's output, plain or logged; empty where none is."""
    # A line that is not JSON is taken as it is.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        line = str(json.loads(line)["error"])
    found = _ERROR.search(line)
    return found[0] if found else ""
