"""The rule for socket paths is shared by server, SDK and command line."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from scheduler_service import runtime_paths
from scheduler_service.runtime_paths import RuntimePathError


def test_xdg_runtime_directory_wins() -> None:
    """The user's runtime directory is used where the system has one."""
    assert runtime_paths.runtime_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path(
        "/run/user/7/isobatch"
    )


@pytest.mark.parametrize(
    "value", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative/run"}]
)
def test_without_a_usable_xdg_directory_the_name_carries_the_user(value: dict[str, str]) -> None:
    """Two users of one temporary directory must not meet in one runtime directory."""
    expected = Path(tempfile.gettempdir()) / f"isobatch-{os.getuid()}"
    assert runtime_paths.runtime_directory(value) == expected


def test_default_addresses_are_unix_sockets_of_the_runtime_directory() -> None:
    """Scheduler and executor differ only in the file name."""
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert (
        runtime_paths.default_scheduler_address(environ)
        == "unix:/run/user/7/isobatch/scheduler.sock"
    )
    assert (
        runtime_paths.default_executor_address(environ) == "unix:/run/user/7/isobatch/executor.sock"
    )


def test_socket_path_limit_counts_bytes_not_characters() -> None:
    """99 bytes pass; a character of two bytes more does not."""
    longest = Path("/" + "a" * 98)
    runtime_paths.check_socket_path(longest)
    with pytest.raises(RuntimePathError, match="at most 99 bytes, got 100"):
        runtime_paths.unix_address(Path("/" + "a" * 97 + "é"))


def test_directory_is_created_private(tmp_path: Path) -> None:
    """The directory is the access control of the sockets, so it starts closed to others."""
    path = runtime_paths.ensure_private_directory(tmp_path / "parent" / "run")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert runtime_paths.ensure_private_directory(path) == path


def test_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    """An existing directory is checked, never silently repaired."""
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o750)
    with pytest.raises(RuntimePathError, match="mode 0700, got 0750"):
        runtime_paths.ensure_private_directory(path)


def test_link_is_refused(tmp_path: Path) -> None:
    """A link planted in a shared temporary directory must not lead us elsewhere."""
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    link = tmp_path / "run"
    link.symlink_to(target)
    with pytest.raises(RuntimePathError, match="must not be a link"):
        runtime_paths.ensure_private_directory(link)


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    """The error names the path."""
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(RuntimePathError, match="can be created, got"):
        runtime_paths.ensure_private_directory(path)


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's directory would let them swap the socket."""
    path = runtime_paths.ensure_private_directory(tmp_path / "run")
    other = path.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(RuntimePathError, match=f"must belong to user {other}"):
        runtime_paths.ensure_private_directory(path)
