"""The pinned requirement files: complete, hashed, and naming no package index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = ["build", "cuda", "dev", "otel", "protos", "run", "uv"]
BY_HAND = ["bench", "bench-mlx", "reference"]


def pins(name: str) -> dict[str, set[str]]:
    """The pinned versions of each package in requirements/<name>.txt."""
    found: dict[str, set[str]] = {}
    for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
        if line and line[0].isalnum():
            requirement = Requirement(line.removesuffix("\\"))
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return found


def test_every_file_is_known() -> None:
    assert sorted(path.stem for path in REQUIREMENTS.glob("*.txt")) == sorted(PINNED + BY_HAND)


@pytest.mark.parametrize("name", PINNED)
def test_every_pin_has_hashes(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text):
        if entry[0].isalnum():
            assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.iterdir()), ids=lambda path: path.name)
def test_no_file_names_a_package_index(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--extra-index" not in text
    assert "--find-links" not in text


def test_run_pins_what_the_project_depends_on() -> None:
    run = pins("run")
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["uvloop"]]:
        requirement = Requirement(text)
        versions = run[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), text


@pytest.mark.parametrize("extra", ["cuda", "otel"])
def test_an_extra_pins_what_it_brings(extra: str) -> None:
    pinned = pins(extra)
    for text in PROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(text)
        assert all(map(requirement.specifier.contains, pinned[canonicalize_name(requirement.name)]))


def test_build_pins_the_build_system() -> None:
    build = pins("build")
    for text in PROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        versions = build[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), text


@pytest.mark.parametrize("name", ["build", "dev", "otel"])
def test_files_installed_together_agree(name: str) -> None:
    run, other = pins("run"), pins(name)
    assert {package: other[package] for package in run.keys() & other.keys()} == {
        package: run[package] for package in run.keys() & other.keys()
    }


def test_commands_are_the_three() -> None:
    assert PROJECT["project"]["scripts"] == {
        "isobatch": "scheduler_service.cli:main",
        "isobatch-scheduler": "scheduler_service.__main__:main",
        "isobatch-executor": "executor_service.__main__:main",
    }
