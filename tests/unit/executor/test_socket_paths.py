"""The socket's path: private folder, stale sockets removed, live ones refused."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_service import socket_paths
from executor_service.errors import ConfigError


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's path has at most about 100 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ib-"))
    yield path
    shutil.rmtree(path)


def test_the_default_lies_in_the_runtime_folder() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert socket_paths.default_address(environ) == "unix:/run/user/7/isobatch/executor.sock"
    for other in ({}, {"XDG_RUNTIME_DIR": "relative"}):
        address = socket_paths.default_address(other)
        assert address.startswith(f"unix:{tempfile.gettempdir()}/isobatch-")
        assert address.endswith("/executor.sock")


def test_a_missing_folder_is_made_private(folder: Path) -> None:
    path = folder / "new" / "e.sock"
    socket_paths.prepare(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    socket_paths.prepare(path)


def test_an_open_folder_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"this user's with mode 0700, got user \d+ and mode 0755"
    ):
        socket_paths.prepare(folder / "e.sock")


def test_a_stale_socket_is_removed(folder: Path) -> None:
    path = folder / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    socket_paths.prepare(path)
    assert not path.exists()


def test_a_live_socket_is_refused(folder: Path) -> None:
    path = folder / "e.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(
            ConfigError, match=r"must be free, got one that a process serves: .*e\.sock"
        ):
            socket_paths.prepare(path)
        assert path.exists()


def test_another_file_is_not_touched(folder: Path) -> None:
    path = folder / "e.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="must be free or a socket, got another file"):
        socket_paths.prepare(path)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="the socket must be possible to make"):
        socket_paths.prepare(folder / "file" / "e.sock")
