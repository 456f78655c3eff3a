"""Files that commands write beside what they print."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_USAGE, Failure


def check_writable(op: str, path: Path | None) -> None:
    """Raise Failure when nothing can be written to `path`; to be asked before anything slow.

    Leaves no file behind where none was. None stands for no file.
    """
    if path is None:
        return
    try:
        if os.path.lexists(path):
            # Not opened: the other end of a pipe would take that for all that comes.
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            path.unlink()
    except (OSError, ValueError) as error:
        raise _failure(op, path, error, EXIT_USAGE) from None


def write_file(op: str, path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, new ones with `mode`; raises Failure and leaves no piece of it behind."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            try:
                file.write(data)
                file.flush()
            except OSError:
                if is_regular:
                    with contextlib.suppress(OSError):
                        path.unlink()
                raise
    except (OSError, ValueError) as error:
        raise _failure(op, path, error, EXIT_FAILURE) from None


def _failure(op: str, path: Path, error: OSError | ValueError, exit_code: int) -> Failure:
    # A path with a zero byte is a ValueError.
    why = error.strerror if isinstance(error, OSError) else error
    return Failure(f"[{op}] the file must be writable, got {path}: {why}", exit_code)
