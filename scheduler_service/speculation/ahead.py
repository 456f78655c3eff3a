"""Steps that are sent ahead of an answer, and what drafts take from them.

Drafts go behind tokens that are known, so a step with drafts waits for the answer to the one before
it, and the step after it waits for what came of them. Where nobody drafts, the executor has the
next step before it has answered the last and never waits for this process. So a step that was not
sent ahead costs time, of everybody in it, and that is part of the price of a draft.
"""

from __future__ import annotations

from typing import Final

FIRST_SAVING: Final = 0.05
"""Share of a step that one sent ahead is expected to save before any was seen."""

MAX_SAVING: Final = 0.25
"""Share that is believed at most: times are noisy."""

_DECAY: Final = 0.995
_FIRST_WEIGHT: Final = 20.0
_NEAR_STEPS: Final = 64
_NUM_SIZES: Final = 7


class AheadSaving:
    """What a step sent ahead saves, as a share of a step that was not, by the number of rows.

    Both kinds are compared with what was expected of a step that is not sent ahead, at times when
    both occur: where one of them has not for long, the expectation rests on the other alone.
    """

    def __init__(self) -> None:
        # By size and kind (not ahead, ahead): weight and weighted ratio of taken to expected.
        self._ratios = [
            [(_FIRST_WEIGHT, _FIRST_WEIGHT), (_FIRST_WEIGHT, _FIRST_WEIGHT * (1.0 - FIRST_SAVING))]
            for _ in range(_NUM_SIZES)
        ]
        self._num_since = [_NEAR_STEPS, _NEAR_STEPS]

    def observe(self, num_rows: int, ratio: float, *, is_ahead: bool) -> None:
        """Take in a step without drafts and prompts.

        Args:
            num_rows: Its rows.
            ratio: What it took over what is expected of such a step that is not sent ahead.
            is_ahead: Whether it was.
        """
        self._num_since[is_ahead] = 0
        self._num_since[not is_ahead] += 1
        if self._num_since[not is_ahead] > _NEAR_STEPS:
            return
        kinds = self._ratios[_size(num_rows)]
        weight, total = kinds[is_ahead]
        kinds[is_ahead] = (weight * _DECAY + 1.0, total * _DECAY + ratio)

    def share(self, num_rows: int) -> float:
        """Return what a step of so many rows saves when it is sent ahead, in 0..MAX_SAVING."""
        alone, ahead = (total / weight for weight, total in self._ratios[_size(num_rows)])
        return min(max(0.0, alone - ahead), MAX_SAVING)


def _size(num_rows: int) -> int:
    return min(num_rows.bit_length(), _NUM_SIZES) - 1


_NUM_CLASSES: Final = 5
_LEARNT: Final = 0.1
_FIRST_GAINS: Final = (0.3, 0.1, 0.1, 0.05, 0.0)


class Prospects:
    """What drafts of the next step are worth, by how long ago there were some worth a try.

    Text that repeats itself does so in stretches, which a wrong draft interrupts for some tokens.
    Whether it pays to wait for the next token and see is learnt from how such waits end; where a
    step was sent ahead instead, what would have been tried is known all the same.
    """

    def __init__(self) -> None:
        # By steps since drafts were found: the mean gain at the next step, as a share of a step.
        self._gains = list(_FIRST_GAINS)
        self._num_since = _NUM_CLASSES - 1

    @property
    def gain(self) -> float:
        """What the drafts of the next step are expected to gain, as a share of a plain step."""
        return self._gains[self._num_since]

    @property
    def has_found(self) -> bool:
        """Whether the last look found drafts worth a try."""
        return not self._num_since

    def observe(self, gain: float | None) -> None:
        """Take in a look for drafts.

        Args:
            gain: What those worth a try are expected to gain, as a share of a plain step; None
                where there were none.
        """
        known = self._gains[self._num_since]
        self._gains[self._num_since] += _LEARNT * ((gain or 0.0) - known)
        if gain is None:
            self._num_since = min(self._num_since + 1, _NUM_CLASSES - 1)
        else:
            self._num_since = 0
