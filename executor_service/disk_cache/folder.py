"""A bounded folder of records: atomic writes, least recently used first out.

Several processes may share it: a record appears by renaming and its name says what it holds, so
two writers of one name write the same bytes, and a file that another process has removed is simply
not there. Each process keeps the whole folder within its own bound.

A record's modification time says when it was used last, as its user tells it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX: Final = ".kv"
_UNFINISHED: Final = ".unfinished-"
# What a process that died has left.
_STALE_SECONDS: Final = 3600.0
# Others may have added to the folder since: so many own writes until it is looked through again.
_WRITES_PER_SCAN: Final = 64


class DiskFolder:
    """Records by name in `root`/`namespace`; the bound holds for all of `root`."""

    def __init__(self, root: Path, namespace: str, limit_bytes: int) -> None:
        """Make the folder, readable for its owner alone; raises OSError."""
        self._root = root
        self._folder = root / namespace
        self._limit = limit_bytes
        self._make()
        self.num_records = 0
        self.num_evicted = 0
        self._num_bytes = 0
        self._writes_to_scan = 0

    def _make(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def read(self, name: str, used_ns: int) -> bytes | None:
        """Return a record and note its use, a Unix time in ns; None where there is none."""
        path = self._path(name)
        try:
            # Not blocking: whatever stands there, like a pipe without a writer, must not be waited
            # for.
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > self._limit:
                return None
            with open(handle, "rb", closefd=False) as file:
                record = file.read()
        except OSError:
            return None
        finally:
            os.close(handle)
        # What cannot be marked, as on a read-only medium, can still be used.
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used_ns, used_ns))
        return record

    def note_use(self, name: str, used_ns: int) -> bool:
        """Note a record's use; False where there is none."""
        try:
            os.utime(self._path(name), ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a record, if it is there."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def write(self, name: str, record: bytes, used_ns: int) -> None:
        """Write a record, then make room for it; raises OSError with nothing of it left."""
        self._make()  # somebody may have emptied the cache meanwhile
        handle, unfinished = tempfile.mkstemp(dir=self._folder, prefix=_UNFINISHED)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(record)
            os.utime(unfinished, ns=(used_ns, used_ns))
            os.replace(unfinished, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        self._num_bytes += len(record)
        self.num_records += 1
        self._writes_to_scan -= 1
        if self._num_bytes > self._limit or self._writes_to_scan <= 0:
            self.trim()

    def trim(self) -> None:
        """Look through the folder and remove the least recently used records above the bound."""
        found = sorted(self._records(), key=lambda each: each[1].st_mtime_ns)
        self._num_bytes = sum(status.st_size for _, status in found)
        self._writes_to_scan = _WRITES_PER_SCAN
        self.num_records = len(found)
        # A little more than needed, so that not every write looks through the folder.
        aim = self._limit if self._num_bytes <= self._limit else self._limit * 15 // 16
        for path, status in found:
            if self._num_bytes <= aim:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self.num_evicted += 1
            self._num_bytes -= status.st_size
            self.num_records -= 1

    def _path(self, name: str) -> Path:
        return self._folder / (name + SUFFIX)

    def _records(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the records of all namespaces; remove what was never finished."""
        oldest = time.time() - _STALE_SECONDS
        for folder in _entries(self._root):
            for entry in (
                _entries(Path(folder.path)) if folder.is_dir(follow_symlinks=False) else ()
            ):
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(SUFFIX):
                    yield Path(entry.path), status
                elif entry.name.startswith(_UNFINISHED) and status.st_mtime < oldest:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
