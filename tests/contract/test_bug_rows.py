"""docs/bug_rows.md names tests that exist, and every test that is named after a row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bug_rows.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 50
    for path, name in NAMED:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), (path, name)


def test_every_test_of_a_row_is_in_its_line() -> None:
    lines = {line[2:5]: line for line in PAGE.splitlines() if re.match(r"\| B\d\d \|", line)}
    found = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for name, row in re.findall(r"^(?:async )?def (test_b(\d\d)_\w+)\(", text, re.M):
            found += 1
            assert f"{path.relative_to(ROOT).as_posix()}::{name}`" in lines[f"B{row}"], name
    assert found > 30
