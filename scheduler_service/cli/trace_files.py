"""Trace files on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_USAGE, Failure
from scheduler_service.cli.output_files import write_file

if TYPE_CHECKING:
    from scheduler_service.tracing.model import Trace


def write_trace(path: Path, data: bytes) -> None:
    """Write a trace for this user alone: it holds the prompt."""
    if not data:
        raise Failure("[trace] the server must know traces, got none from it", EXIT_FAILURE)
    write_file("trace", path, data, 0o600)


def read_trace(path: Path) -> Trace:
    """Return the trace in a file."""
    from scheduler_service.wire import trace as wire

    try:
        if path.is_char_device():
            # Such as /dev/zero, which never ends.
            raise Failure(f"[trace] it must be a file or a pipe, got device {path}", EXIT_USAGE)
        return wire.read(path.read_bytes())
    except OSError as error:
        raise Failure(
            f"[trace] the file must be readable, got {path}: {error.strerror}", EXIT_USAGE
        ) from None
    except wire.TraceFormatError as error:
        raise Failure(f"{error}, got {path}", EXIT_USAGE) from None
