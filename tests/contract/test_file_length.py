"""No hand-written file is longer than 400 lines: one that is has several reasons to change."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "scheduler_service",
    "executor_service",
    "kernels",
    "protos",
    "scripts",
    "tests",
    "deploy",
    "training",
)
SUFFIXES = {"", ".cpp", ".cu", ".h", ".metal", ".proto", ".py", ".sh", ".toml"}
MOST_LINES = 400


def hand_written_files() -> list[Path]:
    """Sources of every kind, without what a machine wrote (protos/gen, golden data, caches)."""
    written_by_machine = ROOT / "protos" / "gen"
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file()
        and path.suffix in SUFFIXES
        and "__pycache__" not in path.parts
        and not path.is_relative_to(written_by_machine)
    ]


def test_some_files_are_looked_at() -> None:
    assert len(hand_written_files()) > 10


@pytest.mark.parametrize("path", hand_written_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_has_one_reason_to_change(path: Path) -> None:
    lines = len(path.read_bytes().splitlines())
    assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines, at most {MOST_LINES}"
