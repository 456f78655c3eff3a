"""What the pages tell a reader to type exists, and so does what they link to."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from scheduler_service.cli.app import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "kernels/README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(page: Path) -> list[str]:
    """The lines of a page's code blocks, fenced or indented, without comments."""
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    lines = [line for block in fenced for line in block.splitlines()] + indented
    return [line.partition(" #")[0].strip() for line in lines]


def commands(page: Path, program: str) -> list[list[str]]:
    """The words behind each call of a program in the page's code blocks."""
    pattern = re.compile(rf"(?:^|&& |; )(?:\.venv/bin/)?{program} (\S[^;&|]*)")
    return [found.split() for line in blocks(page) for found in pattern.findall(line)]


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    for words in commands(ROOT / name, "isobatch"):
        command: click.Command | None = cli
        for word in words:
            if not isinstance(command, click.Group) or word.startswith("-"):
                break
            command = command.get_command(click.Context(command), word)
            assert command is not None, f"isobatch {' '.join(words)}"
    for words in commands(ROOT / name, "make"):
        assert words[0] in MAKE_TARGETS, f"make {' '.join(words)}"


@pytest.mark.parametrize("name", NAMES)
def test_scripts_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"(?:python|pytest) ((?:tests|scripts|deploy)/[\w/.-]+)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


def test_commands_are_found() -> None:
    page = ROOT / "docs/every_day_on_a_mac.md"
    assert ["service", "install"] in commands(page, "isobatch")
    assert ["run"] in commands(page, "make")
