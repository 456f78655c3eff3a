"""The services share no code: what both need is there twice, and the copies are equal."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["early_stop.py", "instruments.py", "logs.py", "settings.py"])
def test_the_copies_are_equal(name: str) -> None:
    copies = {(ROOT / f"{side}_service" / name).read_bytes() for side in ("scheduler", "executor")}
    assert len(copies) == 1
