"""The folder in which the scheduler keeps traces: one private file for each traced request.

With a bound, the files that were written first go when newer ones need their place. Whatever else
lies in the folder is left alone.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import threading
import time
from pathlib import Path

from scheduler_service import logs, runtime_paths
from scheduler_service.errors import ConfigurationError

SUFFIX = ".isotrace"
_LOG = logs.get_logger(__name__)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 80
_UNFINISHED = ".part"
# What a process that died has left.
_STALE_SECONDS = 3600.0


def file_name(request_id: str) -> str:
    """Return the name of a request's file; ids that are no file names get a digest of theirs."""
    safe = _UNSAFE.sub("_", request_id)[:_MAX_NAME]
    if safe != request_id:
        safe += "-" + hashlib.blake2b(request_id.encode(), digest_size=4).hexdigest()
    return safe + SUFFIX


class TraceFolder:
    """Writes traces beside the event loop. A trace holds its prompt, so all of it is private."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """Make the folder, for this user alone; raises ConfigurationError.

        It keeps at most `limit_bytes`, but always the newest trace; 0 is no bound.
        """
        self.path = path
        self._limit = limit_bytes
        # One look through the folder at a time.
        self._trimming = threading.Lock()
        self._num_bytes = limit_bytes + 1  # not known yet: the first write looks
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            runtime_paths.ensure_private_directory(path, "trace_dir")
        except runtime_paths.RuntimePathError as error:
            raise ConfigurationError(f"[config] {error.rule}") from error

    def save(self, request_id: str, data: bytes) -> None:
        """Begin to write a request's trace; a failure is logged, and hurts no request."""
        task = asyncio.ensure_future(asyncio.to_thread(self._write, request_id, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._tasks)

    def _write(self, request_id: str, data: bytes) -> None:
        path = self.path / file_name(request_id)
        part = path.with_suffix(_UNFINISHED)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            part.replace(path)
            self._make_room(len(data))
        except OSError as error:
            # A disk that is full stays full if each failure leaves a piece.
            with contextlib.suppress(OSError):
                part.unlink()
            _LOG.warning("trace_not_written", path=str(path), error=error.strerror or str(error))

    def _make_room(self, num_new_bytes: int) -> None:
        """Note what was written; remove the oldest traces above the bound."""
        if not self._limit:
            return
        with self._trimming:
            self._num_bytes += num_new_bytes
            if self._num_bytes <= self._limit:
                return
            found = sorted(self._files(), key=lambda each: (each[1].st_mtime_ns, each[0]))
            self._num_bytes = sum(status.st_size for _, status in found)
            # A little more than needed, so that not every write looks through the folder.
            aim = self._limit if self._num_bytes <= self._limit else self._limit * 15 // 16
            num_removed = 0
            for path, status in found[:-1]:
                if self._num_bytes <= aim:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    num_removed += 1
                self._num_bytes -= status.st_size
        if num_removed:
            _LOG.info("traces_removed", count=num_removed, folder=str(self.path))

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the traces and their status; remove what was never finished."""
        found = []
        oldest = time.time() - _STALE_SECONDS
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        found.append((Path(entry.path), status))
                    elif entry.name.endswith(_UNFINISHED) and status.st_mtime < oldest:
                        os.unlink(entry.path)
        return found
