"""Where downloaded models and remembered digests are kept.

`ISOBATCH_CACHE` names the folder; without it, it is the user's cache folder of this system.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from executor_service.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CACHE_VARIABLE = "ISOBATCH_CACHE"


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder, without creating it; raises ConfigError for a home that is none."""
    value = (os.environ if environ is None else environ).get(CACHE_VARIABLE, "")
    try:
        return Path(value).expanduser() if value else platformdirs.user_cache_path("isobatch")
    except RuntimeError as error:
        raise ConfigError(
            f"[config] {CACHE_VARIABLE} must be in a home that exists, got {value}"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that others see the old content or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
