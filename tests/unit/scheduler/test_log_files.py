"""Log files: private, rotated; and fields bound to a task."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_service import logs as executor_logs
from scheduler_service import logs
from scheduler_service.__main__ import main


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for each in root.handlers:
        if isinstance(each, logging.FileHandler):
            each.close()
    root.handlers[:], root.level = handlers, level


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_is_made_with_its_folder_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "scheduler.log"
    logs.configure("info", "json", file=str(path))
    logs.get_logger("x").info("serving")
    assert _lines(path)[0]["event"] == "serving"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_full_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 2000)
    monkeypatch.setattr(logs, "MAX_OLD_FILES", 2)
    path = tmp_path / "scheduler.log"
    logs.configure("info", "json", file=str(path))
    for number in range(100):
        logs.get_logger("x").info("line", number=number)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"scheduler.log", "scheduler.log.1", "scheduler.log.2"}
    for each in tmp_path.iterdir():
        assert each.stat().st_size <= 2000
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert _lines(path)[-1]["number"] == 99


async def test_bound_fields_belong_to_one_task(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    logs.configure("debug", "json", file=str(path))

    async def call(name: str) -> None:
        logs.bind(request_id=name)
        await asyncio.sleep(0)
        logs.bind(step_id=1)
        logging.getLogger("library").warning("careful")
        logs.get_logger("x").debug("done", step_id=2)

    await asyncio.gather(call("a"), call("b"))
    logs.get_logger("x").warning("outside")
    lines = [(each["event"], each.get("request_id"), each.get("step_id")) for each in _lines(path)]
    assert sorted(lines[:-1]) == [
        ("careful", "a", 1), ("careful", "b", 1), ("done", "a", 2), ("done", "b", 2)
    ]  # fmt: skip
    assert lines[-1] == ("outside", None, None)


def test_a_file_that_cannot_be_written_is_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--log-file", str(tmp_path / "file" / "x.log")]) == 78
    assert "log_file must be writable, got " in capsys.readouterr().err


class FullDisk(io.StringIO):
    """A file that takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("module", [logs, executor_logs])
def test_a_full_disk_costs_one_line_on_standard_error(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module.configure("info", "console", file=str(tmp_path / "a.log"))
    (handler,) = logging.getLogger().handlers
    monkeypatch.setattr(handler, "stream", FullDisk())
    for _ in range(3):
        module.get_logger("x").info("line")
    said = capsys.readouterr().err
    assert said == f"[logs] {tmp_path / 'a.log'} must take lines, got No space left on device\n"
