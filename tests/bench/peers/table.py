"""Ours beside theirs: medians, bests, ratios, and how they stand to what we promised ourselves."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

OURS: Final = "isobatch"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, measured on both sides in turn; `ours[i]` and `theirs[i]` ran side by side."""

    group: str  # what is measured, as a heading
    label: str
    peer: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    more_is_better: bool = True
    floor: float | None = None  # least ratio that we accept
    goal: float | None = None  # ratio that we want

    def __post_init__(self) -> None:
        """Refuses rows that compare nothing."""
        if not self.ours or len(self.ours) != len(self.theirs):
            raise ValueError(f"[bench] {self.label}: a row needs pairs of measurements")

    @property
    def medians(self) -> tuple[float, float]:
        """Ours, theirs."""
        return statistics.median(self.ours), statistics.median(self.theirs)

    @property
    def bests(self) -> tuple[float, float]:
        """Ours, theirs."""
        best = max if self.more_is_better else min
        return best(self.ours), best(self.theirs)

    def _ratio(self, pair: tuple[float, float]) -> float:
        ours, theirs = pair if self.more_is_better else pair[::-1]
        return ours / theirs

    @property
    def ratio(self) -> float:
        """Of the medians: above 1 we are ahead."""
        return self._ratio(self.medians)

    @property
    def ratio_of_bests(self) -> float:
        """Of the best rounds: above 1 we are ahead."""
        return self._ratio(self.bests)

    @property
    def verdict(self) -> str:
        """How the ratio of the medians stands to floor and goal."""
        if self.floor is None or self.goal is None:
            return ""
        aims = f"{self.floor:g}x / {self.goal:g}x"
        if self.ratio >= self.goal:
            return f"{aims}: goal met"
        return f"{aims}: {'floor met' if self.ratio >= self.floor else 'below floor'}"

    def to_json(self) -> dict[str, Any]:
        """All of it, raw values first."""
        return {
            "group": self.group,
            "label": self.label,
            "peer": self.peer,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "ours": list(self.ours),
            "theirs": list(self.theirs),
            "median_ours": self.medians[0],
            "median_theirs": self.medians[1],
            "best_ours": self.bests[0],
            "best_theirs": self.bests[1],
            "ratio": self.ratio,
            "ratio_of_bests": self.ratio_of_bests,
            "floor": self.floor,
            "goal": self.goal,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The inverse of `to_json`; what follows from the raw values is computed anew."""
        names = ("group", "label", "peer", "unit", "more_is_better", "floor", "goal")
        plain_fields: dict[str, Any] = {name: fields[name] for name in names}
        return cls(ours=tuple(fields["ours"]), theirs=tuple(fields["theirs"]), **plain_fields)


def worst_fall(rates: Sequence[float]) -> float:
    """Largest share lost from one rate to the next; 0 when none is lower than the one before."""
    falls = (1 - after / before for before, after in itertools.pairwise(rates))
    return max(0.0, *falls) if len(rates) > 1 else 0.0


def number(value: float) -> str:
    """A figure with as many digits as it deserves."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def raw(values: Sequence[float]) -> str:
    """All values in the order in which they were measured."""
    return " ".join(number(value) for value in values)


def markdown(rows: Sequence[Row]) -> str:
    """Tables by group: medians, bests, ratios, floor and goal, and both raw columns."""
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in rows):
        lines += [
            f"### {group}",
            "",
            f"| | {OURS} | peer | ratio | best: {OURS} | peer | ratio | floor / goal "
            f"| rounds: {OURS} | peer |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in (row for row in rows if row.group == group):
            cells = [
                f"{row.label}, {row.unit}, against {row.peer}",
                *map(number, row.medians),
                f"**{row.ratio:.2f}x**",
                *map(number, row.bests),
                f"{row.ratio_of_bests:.2f}x",
                row.verdict,
                raw(row.ours),
                raw(row.theirs),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plain(rows: Sequence[Row]) -> str:
    """The same for a terminal, a row of raw values under each."""
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in rows):
        lines.append(f"\n{group}")
        for row in (row for row in rows if row.group == group):
            (ours, theirs), (best, their_best) = row.medians, row.bests
            lines += [
                f"  {row.label:<26} {number(ours):>6} : {number(theirs):>6} {row.unit:<5} "
                f"{row.ratio:5.2f}x   best {number(best):>6} : {number(their_best):>6} "
                f"{row.ratio_of_bests:5.2f}x   {row.peer}  {row.verdict}",
                f"      ours   {raw(row.ours)}",
                f"      theirs {raw(row.theirs)}",
            ]
    return "\n".join(lines)
