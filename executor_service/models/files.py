"""Reads files of a model, with errors that name the file."""

from __future__ import annotations

import json
import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING

from executor_service.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Map a file read-only for the time of the block; slices must be released inside it."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelError(
            f"[model] the file must be readable, got {error.strerror}: {path}"
        ) from error
    with file:
        if file.seek(0, 2) == 0:
            raise ModelError(f"[model] the file must not be empty, got 0 bytes: {path}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            yield view


def read_text(path: Path) -> str:
    """Read a file of UTF-8; raises ModelError."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ModelError(
            f"[model] the file must be readable, got {error.strerror}: {path}"
        ) from error
    except ValueError as error:
        raise ModelError(f"[model] the file must be UTF-8, got {error}: {path}") from error


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; raises ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"[model] the file must be readable, got {error.strerror}: {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"[model] the file must be JSON, got {error}: {path}") from error
    if not isinstance(values, dict):
        raise ModelError(f"[model] the file must hold an object, got {values!r:.40}: {path}")
    return values
