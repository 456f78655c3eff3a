"""A native module that is older than the sources beside it is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from executor_service import __main__ as executor
from executor_service import doctor
from isobatch_kernels import source_digest as module
from isobatch_kernels.source_digest import source_digest, staleness

_cpu = pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package's folder with sources."""
    package = tmp_path / "package"
    (package / "cpp").mkdir(parents=True)
    (package / "cpp" / "a.cpp").write_text("int a;")
    (package / "cpp" / "b.h").write_text("int b;")
    (tmp_path / "CMakeLists.txt").write_text("project(x)")
    return package


def test_every_source_counts_and_nothing_else(folder: Path) -> None:
    found = {source_digest(folder)}
    (folder / "cpp" / "notes.md").write_text("x")
    (folder / "backend.py").write_text("x")
    assert {source_digest(folder)} == found
    (folder / "cpp" / "a.cpp").write_text("int c;")
    found.add(source_digest(folder))
    (folder / "cpp" / "b.h").rename(folder / "cpp" / "c.h")
    found.add(source_digest(folder))
    (folder / "cpp" / "d.cpp").touch()
    found.add(source_digest(folder))
    (folder.parent / "CMakeLists.txt").write_text("project(y)")
    found.add(source_digest(folder))
    assert len(found) == 5
    assert all(len(each) == 16 for each in found)


def test_an_installed_wheel_has_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source_digest(tmp_path) == ""
    monkeypatch.setattr(module, "source_digest", lambda: "")
    assert staleness() == ""


@pytest.mark.skipif(not source_digest(), reason="an installed wheel has no sources")
def test_the_module_that_is_tested_was_built_from_these_sources() -> None:
    assert staleness() == ""


@pytest.mark.parametrize("built", ["0123456789abcdef", None])
def test_an_older_module_is_named_with_what_to_run(
    built: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of other sources, and one of before modules had a digest."""
    monkeypatch.setattr(module, "source_digest", lambda: "f" * 16)
    if built is None:
        monkeypatch.delattr(_cpu, "source_digest", raising=False)
    else:
        monkeypatch.setattr(_cpu, "source_digest", built, raising=False)
    words = staleness()
    assert f"({'f' * 16}), got one of {built or 'none'}: run `make setup` in " in words
    executor._warn_of_old_kernels()
    assert words in caplog.text
    (check,) = (each for each in doctor.check_kernels("auto", "auto") if "module" in each.name)
    assert (check.state, check.detail) == (doctor.WARNING, words)


def test_the_build_writes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "digest.cpp"
    subprocess.run([sys.executable, "-I", str(module.__file__), str(path)], check=True)
    assert f'source_digest[] = "{source_digest()}";' in path.read_text()
