"""The folder in which the scheduler keeps traces: one private file for each traced request."""

import asyncio
import contextlib
import hashlib
import os
import re
from pathlib import Path

from scheduler_service import logs, runtime_paths
from scheduler_service.errors import ConfigurationError

SUFFIX = ".isotrace"
_LOG = logs.get_logger(__name__)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 80


def file_name(request_id: str) -> str:
    """Return the name of a request's file; ids that are no file names get a digest of theirs."""
    safe = _UNSAFE.sub("_", request_id)[:_MAX_NAME]
    if safe != request_id:
        safe += "-" + hashlib.blake2b(request_id.encode(), digest_size=4).hexdigest()
    return safe + SUFFIX


class TraceFolder:
    """Writes traces beside the event loop. A trace holds its prompt, so all of it is private."""

    def __init__(self, path: Path) -> None:
        """Make the folder, for this user alone; raises ConfigurationError."""
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            runtime_paths.ensure_private_directory(path)
        except runtime_paths.RuntimePathError as error:
            raise ConfigurationError(f"[config] trace_dir: {error}") from error

    def save(self, request_id: str, data: bytes) -> None:
        """Begin to write a request's trace; a failure is logged, and hurts no request."""
        task = asyncio.ensure_future(asyncio.to_thread(self._write, request_id, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._tasks)

    def _write(self, request_id: str, data: bytes) -> None:
        path = self._path / file_name(request_id)
        part = path.with_suffix(".part")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            part.replace(path)
        except OSError as error:
            # A disk that is full stays full if each failure leaves a piece.
            with contextlib.suppress(OSError):
                part.unlink()
            _LOG.warning("trace_not_written", path=str(path), error=error.strerror or str(error))
