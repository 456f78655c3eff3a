"""Trace files on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_USAGE, Failure

if TYPE_CHECKING:
    from scheduler_service.tracing.model import Trace


def write_trace(path: Path, data: bytes) -> None:
    """Write a trace for this user alone: it holds the prompt."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise Failure(
            f"[trace] the file must be writable, got {path}: {error.strerror}", EXIT_FAILURE
        ) from None
    if not data:
        raise Failure("[trace] the server must know traces, got none from it", EXIT_FAILURE)


def read_trace(path: Path) -> Trace:
    """Return the trace in a file."""
    from scheduler_service.wire import trace as wire

    try:
        return wire.read(path.read_bytes())
    except OSError as error:
        raise Failure(
            f"[trace] the file must be readable, got {path}: {error.strerror}", EXIT_USAGE
        ) from None
    except wire.TraceFormatError as error:
        raise Failure(f"{error}, got {path}", EXIT_USAGE) from None
