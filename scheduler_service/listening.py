"""Where the scheduler listens: an address that nobody else serves on, private to this user."""

import contextlib
import errno
import os
import socket

import grpc

from scheduler_service import runtime_paths
from scheduler_service.config import socket_path
from scheduler_service.errors import ConfigurationError

_SOCKET_UMASK = 0o177
_PROBE_SECONDS = 1.0


def check_free(address: str) -> None:
    """Raise ConfigurationError when another process serves on `address`.

    To be asked before anything else is taken: a second scheduler has the metrics port of the first
    as well, and should hear of the first and not of the port.
    """
    if _is_served(address):
        raise ConfigurationError(
            f"[server] the address must be free, got {address}: another process serves on it, "
            "most likely a scheduler (isobatch stats asks it)"
        )


def _is_served(address: str) -> bool:
    path = socket_path(address)
    if path is None:
        host, _, port = address.rpartition(":")
        target = (host.removeprefix("[").removesuffix("]"), int(port))
        with contextlib.suppress(OSError):
            # Port 0 is any free one, and nobody listens on it.
            socket.create_connection(target, _PROBE_SECONDS).close()
            return True
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A process that is stopped or overrun takes no connection (EAGAIN), and must not hold us.
        probe.settimeout(_PROBE_SECONDS)
        return probe.connect_ex(os.fspath(path)) in (0, errno.EAGAIN)


def bind(server: grpc.aio.Server, address: str) -> str:
    """Let `server` listen, on a socket with mode 0600; raises ConfigurationError.

    Returns the address, which for port 0 has the port that the system chose.
    """
    path = socket_path(address)
    if path is None:
        return f"{address.rpartition(':')[0]}:{_add_port(server, address)}"
    try:
        runtime_paths.ensure_private_directory(path.parent)
    except runtime_paths.RuntimePathError as error:
        raise ConfigurationError(str(error)) from error
    # gRPC replaces an existing socket file without a question, even one that is in use.
    check_free(address)
    former = os.umask(_SOCKET_UMASK)
    try:
        _add_port(server, address)
    finally:
        os.umask(former)
    return address


def _add_port(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(
            f"[server] the address must be free, got {address}{_trouble(address)}"
        ) from error


def _trouble(address: str) -> str:
    """Return why nobody can listen on an address, which gRPC keeps to itself; empty if unknown."""
    path = socket_path(address)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_UNIX if path else socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(os.fspath(path) if path else (host, int(port)))
        except OSError as error:
            return f": {os.strerror(error.errno)}" if error.errno else f": {error}"
    if path:
        path.unlink(missing_ok=True)
    return ""
