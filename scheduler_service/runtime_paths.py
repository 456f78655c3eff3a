"""Where the sockets of the running services live: one rule for server, SDK and command line.

The runtime directory is `$XDG_RUNTIME_DIR/isobatch`, or `<temporary directory>/isobatch-<uid>`
where that variable is unset. It belongs to the user alone (mode 0700): who can enter it can talk to
the services. Standard library only, because the SDK imports it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SCHEDULER_SOCKET_NAME: Final = "scheduler.sock"
EXECUTOR_SOCKET_NAME: Final = "executor.sock"

# sun_path holds 104 bytes on macOS and 108 on Linux, terminator included; one bound for both.
MAX_SOCKET_PATH_BYTES: Final = 99

UNIX_PREFIX: Final = "unix:"

_DIRECTORY_MODE: Final = 0o700


class RuntimePathError(Exception):
    """A socket path or its directory cannot be used.

    `rule` names what is wrong and the value; the message says in front who found it.
    """

    def __init__(self, rule: str) -> None:
        super().__init__(f"[runtime_paths] {rule}")
        self.rule = rule


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of the sockets, without creating it.

    A relative `XDG_RUNTIME_DIR` is ignored, as the XDG base directory specification asks.
    """
    values = os.environ if environ is None else environ
    base = values.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base):
        return Path(base) / "isobatch"
    return Path(tempfile.gettempdir()) / f"isobatch-{os.getuid()}"


def scheduler_socket(environ: Mapping[str, str] | None = None) -> Path:
    """Return the default path of the scheduler's socket."""
    return runtime_directory(environ) / SCHEDULER_SOCKET_NAME


def executor_socket(environ: Mapping[str, str] | None = None) -> Path:
    """Return the default path of the executor's socket."""
    return runtime_directory(environ) / EXECUTOR_SOCKET_NAME


def unix_address(path: Path) -> str:
    """Return the gRPC address of a socket path; raises RuntimePathError when it is too long."""
    check_socket_path(path)
    return f"{UNIX_PREFIX}{path}"


def default_scheduler_address(environ: Mapping[str, str] | None = None) -> str:
    """Return the address where clients look for a scheduler unless told otherwise."""
    return unix_address(scheduler_socket(environ))


def default_executor_address(environ: Mapping[str, str] | None = None) -> str:
    """Return the address where a scheduler looks for its executor unless told otherwise."""
    return unix_address(executor_socket(environ))


def check_socket_path(path: Path) -> None:
    """Raise RuntimePathError when the path is longer than every supported system can bind."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise RuntimePathError(
            f"a socket path must be at most {MAX_SOCKET_PATH_BYTES} bytes, got {length}: {path}"
        )


def ensure_private_directory(path: Path, name: str = "the runtime directory") -> Path:
    """Create the directory with mode 0700 where it is missing, and return it.

    An existing one must be a real directory of this user that nobody else can enter: in a shared
    temporary directory somebody else might have made it first. Raises RuntimePathError otherwise,
    which calls it `name`.
    """
    try:
        path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise RuntimePathError(
            f"{name} must be a directory that can be created, got {path}: {error.strerror}"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimePathError(f"{name} must not be a link, got {path}")
    if status.st_uid != os.getuid():
        raise RuntimePathError(
            f"{name} must belong to user {os.getuid()}, got user {status.st_uid}: {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise RuntimePathError(f"{name} must have mode 0700, got {mode:04o}: {path}")
    return path
