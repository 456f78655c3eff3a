"""The Makefile: what it lists, and that a question reaches the program as it was typed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[3] / "Makefile"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the Makefile, a setup that notes its argument, and an isobatch that echoes."""
    shutil.copy(MAKEFILE, tmp_path)
    for name, text in {
        "scripts/setup": 'echo "setup $1"',
        ".venv/bin/isobatch": 'printf "<%s>" isobatch "$@"',
        ".venv/bin/pytest": 'printf "<%s>" pytest "$@"',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return tmp_path


def make(repository: Path, *arguments: str) -> str:
    """Standard output of make, without what an outer make left in the environment."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MAKE", "ISOBATCH_")) and key not in {"MFLAGS", "PROMPT", "VENV"}
    }
    return subprocess.run(
        ["make", *arguments], cwd=repository, env=kept, capture_output=True, text=True, check=True
    ).stdout


def test_help_is_the_default_and_lists_every_target(repository: Path) -> None:
    said = make(repository)
    targets = next(
        line for line in MAKEFILE.read_text().splitlines() if line.startswith(".PHONY:")
    ).split()[1:]
    for target in targets:
        assert f"make {target} " in said


@pytest.mark.parametrize("arguments", [(), ("PROMPT=",)], ids=["none", "empty"])
def test_run_sets_up_and_asks_the_default_question(
    repository: Path, arguments: tuple[str, ...]
) -> None:
    said = make(repository, "run", *arguments)
    assert said.startswith("setup run\n")
    assert "<isobatch><generate><--serve><--max-tokens><400><--prompt><Hello!" in said


@pytest.mark.parametrize(
    "prompt", ["Why is the sky blue?", "It costs $5 $(HOME)", "\"quoted\" 'twice' `too`", "*"]
)
def test_question_arrives_as_typed(repository: Path, prompt: str) -> None:
    assert f"<--prompt><{prompt}>" in make(repository, "run", f"PROMPT={prompt}")


def test_tests_take_arguments(repository: Path) -> None:
    said = make(repository, "test", "PYTEST_ARGS=-n 0 tests/unit")
    assert said == "setup dev\n<pytest><-n><0><tests/unit>"
