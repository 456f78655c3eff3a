"""A small line plot as SVG, to stand inside a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT: Final = 64
_RIGHT: Final = 210  # room for the names
_TOP: Final = 16
_BOTTOM: Final = 48
# Told apart also by people who do not see all colours (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def _step(largest: float) -> float:
    """Return a round distance of about five lines."""
    power = 10.0 ** math.floor(math.log10(largest / 5))
    return next(power * each for each in (1, 2, 5, 10) if power * each * 5 >= largest)


def line_plot(
    x: Sequence[int], lines: Mapping[str, Sequence[float]], *, x_label: str, y_label: str
) -> str:
    """Return an <svg> element. Each line has a value for each x; y begins at 0."""
    largest = max((value for values in lines.values() for value in values), default=0.0) or 1.0
    step = _step(largest)
    top = step * math.ceil(largest / step)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    span = max(x) - min(x) or 1

    def at(index: int, value: float) -> tuple[float, float]:
        across = (x[index] - min(x)) / span
        return _LEFT + across * width, _TOP + (1 - value / top) * height

    parts = []
    for line in range(round(top / step) + 1):
        value = line * step
        y = at(0, value)[1]
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for index, each in enumerate(x):
        parts.append(
            f'<text x="{at(index, 0)[0]:.1f}" y="{_TOP + height + 18}" '
            f'text-anchor="middle">{each}</text>'
        )
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [at(index, value) for index, value in enumerate(values)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        y, left = _TOP + 14 + 22 * number, _LEFT + width + 16
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            + "".join(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points
            )
            + f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            + f'<text x="{left + 18}" y="{y}">{escape(name)}</text>'
        )
    middle = _TOP + height / 2
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(y_label)}</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{"".join(parts)}</svg>'
    )
