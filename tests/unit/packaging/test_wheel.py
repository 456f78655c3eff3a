"""The wheel: what is in it, and what becomes of a build whose compiler fails."""

import os
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"scheduler_service", "executor_service", "isobatch_kernels", "isobatch"}
NO_COMPILER = {"CC": "/bin/false"}


def build(folder: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel of the working tree into `folder`, without touching the tree."""
    arguments = [f"build-dir={folder / 'build'}", *settings]
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"]
        + [str(folder)]
        + [f"--config-settings={argument}" for argument in arguments]
        + [str(ROOT)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def names_in(folder: Path) -> list[str]:
    """The names of the files in the one wheel in `folder`."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a wheel built without the native module (which would only cost time here)."""
    folder = tmp_path_factory.mktemp("wheel")
    result = build(folder, "wheel.cmake=false")
    assert result.returncode == 0, result.stdout + result.stderr
    return names_in(folder)


def test_top_level_names_are_the_four_packages(names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1


def test_wheel_carries_types_and_licence_and_commands(names: list[str]) -> None:
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


def test_wheel_carries_the_draft_model_and_its_licence(names: list[str]) -> None:
    assert "executor_service/models/data/smollm2-draft.gguf" in names
    assert "executor_service/models/data/NOTICE" in names


def test_wheel_carries_no_sources_of_the_native_module(names: list[str]) -> None:
    assert [name for name in names if name.endswith((".cpp", ".h"))] == []


@pytest.mark.parametrize("folder", ["kernels", "protos", "protos/gen", "deploy", "tests"])
def test_source_roots_are_not_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.skipif("ISOBATCH_WHEEL" not in os.environ, reason="no wheel was given to be tested")
@pytest.mark.parametrize("package", sorted(PACKAGES - {"isobatch"}))
def test_the_given_wheel_is_what_the_tests_import(package: str) -> None:
    file = import_module(package).__file__
    assert file is not None
    assert not Path(file).is_relative_to(ROOT)


def test_failing_compiler_on_linux_is_an_error_that_names_it(tmp_path: Path) -> None:
    result = build(tmp_path, **NO_COMPILER, ISOBATCH_ALLOW_NO_NATIVE="false")
    if sys.platform == "darwin":
        pytest.skip("a Mac installs without the native module instead")
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "/bin/false" in said
    assert "a C++17 compiler is needed: on Debian or Ubuntu run 'apt-get install g++'" in said
    assert not list(tmp_path.glob("*.whl"))


def test_failing_compiler_leaves_a_wheel_without_the_native_module(tmp_path: Path) -> None:
    result = build(tmp_path, **NO_COMPILER, ISOBATCH_ALLOW_NO_NATIVE="true")
    assert result.returncode == 0, result.stdout + result.stderr
    names = names_in(tmp_path)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == PACKAGES
    assert [name for name in names if name.endswith((".so", ".dylib"))] == []
    assert any(path.name.endswith("-py3-none-any.whl") for path in tmp_path.iterdir())
