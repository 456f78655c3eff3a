"""The folder of traces: whole files or none."""

from __future__ import annotations

import errno
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
