"""Where the executor listens: a Unix socket that only this user can reach.

The default is `$XDG_RUNTIME_DIR/isobatch/executor.sock`, or `<temporary directory>/isobatch-<uid>/`
where that variable is unset. The folder has mode 0700 and the socket 0600.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor_service.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

UNIX_PREFIX: Final = "unix:"
SOCKET_NAME: Final = "executor.sock"
# sun_path holds 104 bytes on macOS and 108 on Linux, terminator included; one bound for both.
MAX_PATH_BYTES: Final = 99
_PROBE_SECONDS: Final = 1.0


def default_address(environ: Mapping[str, str]) -> str:
    """Return the address where a scheduler looks unless told otherwise."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base):
        folder = Path(base) / "isobatch"
    else:
        folder = Path(tempfile.gettempdir()) / f"isobatch-{os.getuid()}"
    return f"{UNIX_PREFIX}{folder / SOCKET_NAME}"


def socket_path(address: str) -> Path:
    """Return the path of a `unix:` address; raises ConfigError when it cannot be bound."""
    path = Path(address.removeprefix(UNIX_PREFIX))
    if not address.startswith(UNIX_PREFIX) or not path.is_absolute():
        raise ConfigError(f"[listen] the address must be unix:/absolute/path, got {address}")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"[listen] a socket path must be at most {MAX_PATH_BYTES} bytes, got {length}: {path}"
        )
    return path


def prepare(path: Path) -> None:
    """Make the socket's folder private and the path free; raises ConfigError.

    A folder that is missing is made; one that exists must be this user's alone. A socket that
    nobody answers is left over from a process that died, and is removed.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"[listen] the socket's folder must be this user's with mode 0700, got user "
                f"{status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}: {folder}"
            )
        remove_stale(path)
    except OSError as error:
        raise ConfigError(
            f"[listen] the socket must be possible to make, got {error.strerror}: {path}"
        ) from error


def remove_stale(path: Path) -> None:
    """Remove a socket that nobody answers; raises ConfigError for a live one or another file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"[listen] the path must be free or a socket, got another file: {path}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise ConfigError(f"[listen] the socket must be free, got one that a process serves: {path}")


def make_private(path: Path) -> None:
    """Give a bound socket mode 0600; raises OSError.

    Its folder lets nobody else in, so nobody can have come before. A umask around binding would do
    the same and also change the files that other threads make meanwhile.
    """
    path.chmod(0o600)
