"""Files that commands write: looked at before anything slow, and whole or not there."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scheduler_service.cli import app, lab
from scheduler_service.cli.failures import Failure
from scheduler_service.cli.output_files import check_writable, write_file
from tests.support.fake_scheduler import FakeScheduler

FULL = Path("/dev/full")


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app.cli, [str(each) for each in arguments])


@pytest.fixture(params=["no folder", "a file as folder", "a folder"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    if request.param == "no folder":
        return tmp_path / "none" / "a", "No such file or directory"
    if request.param == "a folder":
        return tmp_path, "Is a directory"
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "a", "Not a directory"


def test_a_trace_that_cannot_be_written_is_found_before_the_request(
    unwritable: tuple[Path, str], fake: FakeScheduler, tmp_path: Path
) -> None:
    path, why = unwritable
    address = ("--address", fake.address)
    old = tmp_path / "old.isotrace"
    old.write_bytes(b"no trace")
    for arguments in (("generate", "-p", "x", *address), ("replay", old, *address)):
        result = _run(*arguments, "--trace", path)
        assert result.exit_code == 2
        if why == "Is a directory":
            # The option says so by itself.
            assert "is a directory" in result.stderr
        else:
            said = f"isobatch: [trace] the file must be writable, got {path}: {why}\n"
            assert result.stderr == said
    assert fake.requests == []


def test_a_report_that_cannot_be_written_is_found_before_the_measurement(
    unwritable: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "private_executors", None)
    path, why = unwritable
    for option in ("--html", "--json"):
        result = _run("lab", "article", option, path)
        assert result.exit_code == 2
        assert result.stderr == f"isobatch: [lab] the file must be writable, got {path}: {why}\n"


def test_looking_leaves_everything_as_it_is(tmp_path: Path) -> None:
    kept, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.write_text("kept")
    link.symlink_to(tmp_path / "not yet there")
    os.mkfifo(pipe)
    # Opening a pipe that nobody reads would wait for ever.
    for path in (tmp_path / "new", kept, link, pipe, FULL, None):
        check_writable("trace", path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "link", "pipe"]
    assert kept.read_text() == "kept"
    with pytest.raises(Failure, match="null"):
        check_writable("trace", Path("a\0b"))


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_named_and_a_device_stays() -> None:
    with pytest.raises(Failure, match="No space left on device") as caught:
        write_file("trace", FULL, b"data")
    assert caught.value.exit_code == 1
    assert FULL.exists()


def test_no_piece_of_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(Failure, match="File too large"):
            write_file("trace", path, b"x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not path.exists()


def test_an_answer_is_printed_though_its_trace_cannot_be_kept(
    fake: FakeScheduler, tmp_path: Path
) -> None:
    """The fake server knows no traces; with --json nothing was streamed before."""
    arguments = ("generate", "-p", "x", "--json", "--address", fake.address)
    result = _run(*arguments, "--trace", tmp_path / "a")
    assert result.exit_code == 1
    assert "w0 w1" in result.stdout
