"""What steps cost as things are now: a cost curve, corrected by the steps that were run.

A curve is measured once, perhaps at a busy moment, and other work on the machine slows all steps
alike. So each number of tokens has the mean of its own recent steps, drawn towards what the curve
says about it at the pace of all recent steps. "Recent" means the same stretch of time for all
numbers of tokens: what slows one for a while slows their comparison by nothing.

All are steps that are not sent ahead of an answer, as those with drafts never are; what the others
save is learnt beside it (`ahead`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from scheduler_service.speculation.ahead import AheadSaving

StepSeconds: TypeAlias = Callable[[int], float]
"""Seconds of a step of so many rows of logits, as things are now. 0 where not known."""

MAX_COUNTED: Final = 64
"""Most tokens of a step that is learnt from; beyond that the curve alone speaks."""

_DECAY: Final = 0.98
_CURVE_WEIGHT: Final = 2.0
_MAX_OUTLIER: Final = 3.0
_MAX_DRAFTED: Final = 2.0
_ADDED_DECAY: Final = 0.99
_ADDED_WEIGHT: Final = 0.5
_MAX_STEEPNESS: Final = 4.0
_ASSUMED_SLOPE: Final = 0.125


def assumed_curve(num_tokens: int) -> float:
    """Return what a step costs where no curve is known, in plain steps: an eighth for a row."""
    return 1.0 + _ASSUMED_SLOPE * (num_tokens - 1)


class StepCosts:
    """Seconds of steps by their tokens."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._saving = AheadSaving()
        # By tokens of a step: (weight, weighted seconds, steps counted when they were right).
        self._means: dict[int, tuple[float, float, int]] = {}
        # By size of a step without drafts: what drafts added to it and what the curve said they
        # would, both in such steps, and steps counted when they were right.
        self._added: dict[int, tuple[float, float, int]] = {}
        # Of all steps: seconds taken, and those of the curve for them.
        self._taken = 0.0
        self._expected = 0.0

    def observe(
        self,
        num_tokens: int,
        seconds: float,
        curve: StepSeconds,
        *,
        num_drafts: int = 0,
        is_ahead: bool = False,
    ) -> None:
        """Take in a step without prompts.

        Args:
            num_tokens: Its tokens, drafts included.
            seconds: What it took.
            curve: The cost curve at its context.
            num_drafts: Its drafts.
            is_ahead: Whether it was sent before the answer to the one ahead of it.
        """
        expected = curve(num_tokens)
        if not 1 <= num_tokens <= MAX_COUNTED or seconds <= 0 or expected <= 0:
            return
        if self._num_steps:
            alone = self.seconds(num_tokens, curve)
            seconds = min(seconds, _MAX_OUTLIER * alone)
            if not num_drafts:
                self._saving.observe(num_tokens, seconds / alone, is_ahead=is_ahead)
            else:
                self._observe_drafts(num_tokens - num_drafts, num_tokens, seconds, curve)
        if is_ahead:
            seconds /= 1.0 - self._saving.share(num_tokens)
        self._num_steps += 1
        weight, total = self._mean(num_tokens)
        self._means[num_tokens] = (weight + 1.0, total + seconds, self._num_steps)
        self._taken = self._taken * _DECAY + seconds
        self._expected = self._expected * _DECAY + expected

    @property
    def pace(self) -> float:
        """Return the time of all recent steps over what the curve said of them."""
        return self._taken / self._expected if self._num_steps else 1.0

    def seconds(self, num_tokens: int, curve: StepSeconds) -> float:
        """Return what a step of so many tokens is expected to take, where `curve` holds."""
        expected = curve(num_tokens) * self.pace
        weight, total = self._mean(num_tokens)
        return (total + _CURVE_WEIGHT * expected) / (weight + _CURVE_WEIGHT)

    def seconds_beyond(self, num_plain: int, num_tokens: int, curve: StepSeconds) -> float:
        """Return the expected time of a step of `num_plain` tokens, of `num_tokens` with drafts.

        The former are run all the time and the latter seldom: where they take longer than the curve
        says, so will these, and more tokens are never cheaper. Else a draft would seem to cost
        nothing whenever other work slows the machine, for as long as the pace takes to follow. And
        what some numbers of drafts were seen to add tells of the others, which may never be run:
        between the points of a curve there may be stairs.
        """
        plain = self.seconds(num_plain, curve)
        by_curve = curve(num_plain)
        if num_tokens <= num_plain or by_curve <= 0:
            return self.seconds(num_tokens, curve)
        steepness = self._steepness(num_plain)
        expected = plain * (1.0 + steepness * (curve(num_tokens) / by_curve - 1.0))
        weight, total = self._mean(num_tokens)
        return max(plain, (total + _CURVE_WEIGHT * expected) / (weight + _CURVE_WEIGHT))

    def _observe_drafts(
        self, num_plain: int, num_tokens: int, seconds: float, curve: StepSeconds
    ) -> None:
        plain, by_curve = self.seconds(num_plain, curve), curve(num_plain)
        if plain <= 0 or by_curve <= 0:
            return
        limited = min(seconds, _MAX_DRAFTED * self.seconds_beyond(num_plain, num_tokens, curve))
        taken, expected = self._faded_added(num_plain)
        taken += max(0.0, limited / plain - 1.0)
        expected += max(0.0, curve(num_tokens) / by_curve - 1.0)
        self._added[_size(num_plain)] = (taken, expected, self._num_steps)

    def _steepness(self, num_plain: int) -> float:
        """Return what drafts add to a step of so many tokens over what the curve says."""
        taken, expected = self._faded_added(num_plain)
        return min((taken + _ADDED_WEIGHT) / (expected + _ADDED_WEIGHT), _MAX_STEEPNESS)

    def _faded_added(self, num_plain: int) -> tuple[float, float]:
        taken, expected, when = self._added.get(_size(num_plain), (0.0, 0.0, 0))
        faded: float = _ADDED_DECAY ** (self._num_steps - when)
        return taken * faded, expected * faded

    def ahead_seconds(self, num_rows: int, curve: StepSeconds) -> float:
        """Return what a step of so many rows saves when it is sent ahead of an answer."""
        return self._saving.share(num_rows) * self.seconds(num_rows, curve)

    def _mean(self, num_tokens: int) -> tuple[float, float]:
        """Return (weight, weighted seconds), faded to the present."""
        weight, total, when = self._means.get(num_tokens, (0.0, 0.0, 0))
        if not weight:
            return 0.0, 0.0
        faded: float = _DECAY ** (self._num_steps - when)
        return weight * faded, total * faded


def _size(num_tokens: int) -> int:
    return num_tokens.bit_length()
