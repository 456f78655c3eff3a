"""The folder of traces: whole files or none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from scheduler_service.tracing.folder import TraceFolder


async def test_a_trace_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = TraceFolder(tmp_path / "traces")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        folder.save("request", b"trace")
        await folder.close()
    assert list((tmp_path / "traces").iterdir()) == []
    assert "trace_not_written" in caplog.text
    folder.save("request", b"trace")
    await folder.close()
    assert (tmp_path / "traces" / "request.isotrace").read_bytes() == b"trace"


async def _save(folder: TraceFolder, name: str, num_bytes: int, written_at: int) -> None:
    folder.save(name, bytes(num_bytes))
    await folder.close()
    path = next(each for each in folder.path.iterdir() if each.stem == name)
    os.utime(path, (written_at, written_at))


def _names(folder: TraceFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


async def test_the_oldest_traces_make_room(tmp_path: Path) -> None:
    """Those of an earlier process as well; what is no trace stays, and so does the newest."""
    former = TraceFolder(tmp_path / "traces")
    for number in range(3):
        await _save(former, f"former{number}", 400, 1000 - number)
    (former.path / "notes.txt").write_text("x" * 5000)
    (former.path / "dead.part").touch()
    os.utime(former.path / "dead.part", (0, 0))
    (former.path / "written-now.part").touch()
    assert len(_names(former)) == 6  # without a bound nothing goes
    folder = TraceFolder(tmp_path / "traces", 1000)
    await _save(folder, "new0", 300, 2000)
    kept = {"notes.txt", "written-now.part"}
    assert _names(folder) == kept | {"former0.isotrace", "new0.isotrace"}
    await _save(folder, "new1", 300, 2001)
    assert _names(folder) == kept | {"former0.isotrace", "new0.isotrace", "new1.isotrace"}
    await _save(folder, "new2", 300, 2002)
    assert _names(folder) == kept | {f"new{number}.isotrace" for number in range(3)}
    await _save(folder, "huge", 5000, 2003)
    assert _names(folder) == kept | {"huge.isotrace"}
