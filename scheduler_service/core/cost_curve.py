"""What a step costs on the executor's machine, from the points that it measured.

The model behind it:
- Steps of decode rows (one token and one row of logits each) and parts of a prompt (one row, one
  row of logits) are measured apart, both without a context. Between two points time is linear in
  tokens; beyond the last one it goes on as steeply; it never falls.
- A step of both costs what a prompt of all its tokens does, and what its decode rows cost beyond a
  prompt of as many tokens: their rows of logits.
- Attention adds the same for each pair of a token and a cached position before its row, for both
  kinds their own. That is taken from the points behind a context.

Speed alone depends on these numbers. Values only, times in seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

PROMPT_SHARE: Final = 0.4
"""What a cached position costs a prompt's token, of its price for a decode row, where that was not
measured: keys and values are read once for many tokens. A CPU had 0.28 to 0.42."""


MAX_TABLE: Final = 4096
"""Up to so many tokens a step's cost is looked up; beyond, it is interpolated when asked for."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured step of equal rows.

    Attributes:
        num_rows: Token rows; as many as tokens in a decode step, one in a part of a prompt.
        num_tokens: Tokens over all rows.
        context_length: Cached positions before each row.
        seconds: Time of the step in the executor.
    """

    num_rows: int
    num_tokens: int
    context_length: int
    seconds: float

    @property
    def is_decode(self) -> bool:
        """True where each row has one token."""
        return self.num_rows == self.num_tokens


class _Line:
    """A non-falling function of the number of tokens, linear between points, 0 at 0 tokens."""

    __slots__ = ("_num_known", "_slope", "_table", "seconds", "tokens")

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        least = 0.0
        for num_tokens, seconds in sorted(points):
            least = max(least, seconds)
            if self.tokens and self.tokens[-1] == num_tokens:
                self.seconds[-1] = least
            else:
                self.tokens.append(num_tokens)
                self.seconds.append(least)
        self._slope = 0.0
        if len(self.tokens) > 1:
            # Over the later half: the last two points alone are noise.
            first = (len(self.tokens) - 1) // 2
            width = self.tokens[-1] - self.tokens[first]
            self._slope = (self.seconds[-1] - self.seconds[first]) / width
        elif self.tokens:
            self._slope = self.seconds[0] / self.tokens[0]
        # Asked for many times in each step.
        most = min(self.tokens[-1], MAX_TABLE) if self.tokens else 0
        self._table = [self._between(num_tokens) for num_tokens in range(most + 1)]
        self._num_known = len(self._table)

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def at(self, num_tokens: int) -> float:
        if num_tokens < self._num_known:
            return self._table[num_tokens] if num_tokens > 0 else 0.0
        return self._between(num_tokens)

    def _between(self, num_tokens: int) -> float:
        if num_tokens <= 0 or not self.tokens:
            return 0.0
        index = bisect.bisect_left(self.tokens, num_tokens)
        if index == len(self.tokens):
            return self.seconds[-1] + (num_tokens - self.tokens[-1]) * self._slope
        after = self.seconds[index]
        if index == 0 or self.tokens[index] == num_tokens:
            # Fewer tokens than were ever measured cost no less: weights are read all the same.
            return after
        width = self.tokens[index] - self.tokens[index - 1]
        share = (num_tokens - self.tokens[index - 1]) / width
        return self.seconds[index - 1] + share * (after - self.seconds[index - 1])


class CostCurve:
    """Expected seconds of steps. Empty where nothing was measured; then all costs are 0."""

    __slots__ = (
        "_decode",
        "_decode_position",
        "_efficient",
        "_prompt",
        "_prompt_position",
        "points",
    )

    def __init__(self, points: Iterable[CostPoint] = ()) -> None:
        """Fit the points; those that make no sense are left out."""
        self.points: Final = tuple(
            point
            for point in points
            if 1 <= point.num_rows <= point.num_tokens and 0 < point.seconds < float("inf")
        )
        decode = [point for point in self.points if point.is_decode]
        # One row of one token begins both kinds.
        prompt = [point for point in self.points if point.num_rows == 1]
        self._decode = _line(decode)
        self._prompt = _line(prompt)
        if len(self._prompt.tokens) < 2:
            self._prompt = self._decode
        if not self._decode:
            self._decode = self._prompt
        self._decode_position = _position_seconds(decode, self._decode)
        longer = [point for point in prompt if not point.is_decode]
        self._prompt_position = (
            _position_seconds(longer, self._prompt) or PROMPT_SHARE * self._decode_position
        )

        self._efficient: dict[float, int] = {}

    def __bool__(self) -> bool:
        return bool(self._decode)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostCurve) and self.points == other.points

    def __hash__(self) -> int:
        return hash(self.points)

    @property
    def prompt_sizes(self) -> Sequence[int]:
        """Tokens of a step at which the curve may bend."""
        return self._prompt.tokens

    def step_seconds(
        self,
        num_decode_rows: int,
        num_tokens: int,
        num_positions: int = 0,
        num_prompt_positions: int = 0,
    ) -> float:
        """Return the seconds of a step.

        Args:
            num_decode_rows: Tokens with a row of logits each: those of decode rows, and of rows
                that verify a draft.
            num_tokens: All tokens of the step, these included.
            num_positions: Cached positions before the decode rows, in all.
            num_prompt_positions: For each token of a prompt the cached positions before its row,
                in all.
        """
        decode = self._decode.at(num_decode_rows)
        attention = num_positions * self._decode_position
        if num_tokens <= num_decode_rows:
            return decode + attention
        logits = max(0.0, decode - self._prompt.at(num_decode_rows))
        together = max(decode, self._prompt.at(num_tokens) + logits)
        return together + attention + num_prompt_positions * self._prompt_position

    def num_fitting(
        self,
        step: tuple[int, int, int, int],
        start: int,
        most: int,
        seconds: float,
    ) -> int:
        """Return how many of `most` more tokens of a prompt fit in a step of so many seconds.

        Args:
            step: The arguments of `step_seconds` for the step without them.
            start: Cached positions before their row.
            most: At least 1.
            seconds: What the step may take.
        """
        num_decode_rows, num_tokens, num_positions, num_prompt_positions = step
        decode, at = self._decode.at(num_decode_rows), self._prompt.at
        logits = max(0.0, decode - at(num_decode_rows))
        attention, position = num_positions * self._decode_position, self._prompt_position
        # The first probe is for all of them, which often fit; then the range is halved.
        low, high, middle = 0, most, most
        while low < high:
            # In the order of `step_seconds`, so that both round alike.
            alone = at(num_tokens + middle) + logits
            cost = alone if alone > decode else decode
            cost = cost + attention + (num_prompt_positions + middle * start) * position
            if cost <= seconds:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def marginal_seconds(self, num_decode_rows: int, num_positions: int = 0) -> float:
        """Return what one more decode row adds, behind a context of its own of that length."""
        more = self._decode.at(num_decode_rows + 1) - self._decode.at(num_decode_rows)
        return more + num_positions * self._decode_position

    def efficient_prompt_tokens(self, share: float) -> int:
        """Return the fewest measured tokens of a prompt at `share` of the best tokens a second.

        0 where nothing was measured.
        """
        if share not in self._efficient:
            self._efficient[share] = self._efficient_prompt_tokens(share)
        return self._efficient[share]

    def _efficient_prompt_tokens(self, share: float) -> int:
        line = self._prompt
        rates = [
            tokens / seconds for tokens, seconds in zip(line.tokens, line.seconds, strict=True)
        ]
        best = max(rates, default=0.0)
        return next(
            (t for t, rate in zip(line.tokens, rates, strict=True) if rate >= share * best), 0
        )


def _line(points: Iterable[CostPoint]) -> _Line:
    return _Line((p.num_tokens, p.seconds) for p in points if p.context_length == 0)


def _position_seconds(points: Iterable[CostPoint], line: _Line) -> float:
    """Return what one cached position adds for one token, over the points behind a context."""
    positions, extra = 0, 0.0
    for point in points:
        if point.context_length:
            positions += point.num_tokens * point.context_length
            extra += max(0.0, point.seconds - line.at(point.num_tokens))
    return extra / positions if positions else 0.0


NO_CURVE: Final = CostCurve()
