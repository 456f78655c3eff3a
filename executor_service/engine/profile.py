"""The profile of a model on this machine: what a step costs by its rows and context.

Speed alone depends on it. The contract of every number (docs/numerics.md) holds whatever it says.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OFF: Final = "off"
MEASURED: Final = "measured"
STORED: Final = "stored"
ORIGINS: Final = (OFF, MEASURED, STORED)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A step of equal rows, each behind `context_length` cached positions."""

    num_rows: int
    num_tokens: int  # over all rows
    context_length: int = 0

    @property
    def is_decode(self) -> bool:
        """True where every row has one token."""
        return self.num_rows == self.num_tokens

    @property
    def tokens_per_row(self) -> int:
        """Tokens of each row."""
        return self.num_tokens // self.num_rows

    @property
    def end(self) -> int:
        """Positions that a row needs."""
        return self.context_length + self.tokens_per_row


@dataclass(frozen=True, slots=True)
class CostPoint:
    """What one shape costs."""

    shape: StepShape
    median_ns: int  # as measured
    num_repeats: int
    duration_ns: int  # the medians made monotone (`monotone`)


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost curve and where it came from."""

    origin: str = OFF  # one of ORIGINS
    measured_at: int = 0  # Unix time in seconds; 0 without a curve
    points: tuple[CostPoint, ...] = ()  # by (decode first, context, tokens)
    # Pairs (most rows, way of computing) for a backend that offers a choice (tuning.Tunable).
    choices: tuple[tuple[int, str], ...] = ()

    def find(self, shape: StepShape) -> CostPoint | None:
        """Return the point of a shape, if it was measured."""
        return next((point for point in self.points if point.shape == shape), None)


class DecodeCost:
    """What the curve expects of decode steps of any size.

    Between the measured numbers of rows it is linear, beyond the last one it goes on as steeply.
    Attention adds the same for each cached position, taken from the points behind a context.
    """

    def __init__(self, profile: Profile) -> None:
        decode = [point for point in profile.points if point.shape.is_decode]
        alone = [point for point in decode if point.shape.context_length == 0]
        self._rows = [point.shape.num_rows for point in alone]
        self._nanoseconds = [float(point.duration_ns) for point in alone]
        self._position_ns = 0.0
        positions, extra = 0, 0.0
        for point in decode:
            if point.shape.context_length and self._rows:
                positions += point.shape.num_rows * point.shape.context_length
                extra += max(0.0, point.duration_ns - self.expected_ns(point.shape.num_rows, 0))
        if positions:
            self._position_ns = extra / positions

    def expected_ns(self, num_rows: int, num_positions: int) -> float:
        """Return the time of a step of `num_rows` rows with so many cached positions in all.

        0 without a curve.
        """
        rows, times = self._rows, self._nanoseconds
        if not rows:
            return 0.0
        if len(rows) == 1:
            alone = times[0] * max(1.0, num_rows / rows[0])
        else:
            index = min(max(bisect.bisect_left(rows, num_rows), 1), len(rows) - 1)
            before, after = rows[index - 1], rows[index]
            share = (num_rows - before) / (after - before)
            alone = times[index - 1] + share * (times[index] - times[index - 1])
        return alone + num_positions * self._position_ns


def monotone(points: Iterable[CostPoint]) -> tuple[CostPoint, ...]:
    """Return the points in order, with durations that never fall as tokens or contexts grow.

    Within one kind (decode, prompt) and context the durations are the least-squares monotone fit
    of the medians, weighted by repeats: noise in one point is shared with its neighbours instead
    of lifting all that follow. A longer context then costs at least what a shorter one does. A
    step of one row with one token begins both kinds.
    """
    points = tuple(points)
    decode = [point for point in points if point.shape.is_decode]
    prompt = [point for point in points if not point.shape.is_decode]
    fitted = _fit_contexts(decode)
    # The single token is a decode step; the parts of a prompt cost no less.
    ones = {p.shape.context_length: p.duration_ns for p in fitted if p.shape.num_tokens == 1}
    return (*fitted, *_fit_contexts(prompt, ones))


def _fit_contexts(
    points: Sequence[CostPoint], floors: dict[int, int] | None = None
) -> list[CostPoint]:
    fitted: list[CostPoint] = []
    # By number of tokens: the cost behind the contexts so far.
    below: dict[int, int] = {}
    for context in sorted({point.shape.context_length for point in points}):
        row = sorted(
            (point for point in points if point.shape.context_length == context),
            key=lambda point: point.shape.num_tokens,
        )
        values = monotone_fit(
            [point.median_ns for point in row], [point.num_repeats for point in row]
        )
        least = (floors or {}).get(context, 0)
        for point, value in zip(row, values, strict=True):
            tokens = point.shape.num_tokens
            least = max(least, round(value), below.get(tokens, 0))
            below[tokens] = least
            fitted.append(replace(point, duration_ns=least))
    return fitted


def monotone_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing values next to the given ones by weighted least squares.

    Pool adjacent violators: Barlow, Bartholomew, Bremner and Brunk, Statistical Inference under
    Order Restrictions, 1972.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = float(value), float(weight), 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_count = pools.pop()
            mean = (before * before_weight + mean * total) / (before_weight + total)
            total, count = total + before_weight, count + before_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
