"""The CPU's choices of speed: how many rows share a panel, so a decoded weight (cpp/linear.h).

A large panel decodes each weight for more rows; a small one keeps more sums in registers. Which is
faster depends on the instruction set and the caches.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT = "default"
# Most rows of a panel by choice; 0 leaves it to the engine.
PANELS = {DEFAULT: 0, "panel4": 4, "panel8": 8, "panel12": 12, "panel16": 16}
_LEAST_ROWS = 5


def _default_panel(rows: int) -> int:
    """Rows of a panel as `panel_rows` of cpp/linear.h chooses them."""
    return rows if rows < 16 else -(-rows // -(-rows // 12))


def panel_choices(rows: int, unit: str) -> list[str]:
    """Names of choices that differ for a number of rows, the default first.

    Tiles of AMX have room for 16 rows and cost the same with fewer, so there is nothing to choose.
    """
    if unit == "amx":
        return [DEFAULT]
    found = {_default_panel(rows): DEFAULT}
    for name, most in PANELS.items():
        if most and rows >= _LEAST_ROWS:
            found.setdefault(-(-rows // -(-rows // most)), name)
    return list(found.values())


def panel_limits(choices: Mapping[int, str]) -> list[tuple[int, int]]:
    """Pairs (rows, most rows of a panel) for the engine.

    Raises:
        ValueError: an unknown name, or a bound below 1.
    """
    for rows, name in choices.items():
        if name not in PANELS or rows < 1:
            known = ", ".join(PANELS)
            raise ValueError(
                f"[cpu_tuning] choices must be of {known} from row 1, got {rows}: {name}"
            )
    return [(rows, PANELS[choices[rows]]) for rows in sorted(choices)]
