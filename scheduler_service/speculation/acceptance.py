"""How often drafts have been right, by how much spoke for them."""

from __future__ import annotations

from typing import Final

NUM_LEVELS: Final = 7
_DECAY: Final = 0.93
_PRIOR: Final = (0.4, 0.4, 0.45, 0.65, 0.8, 0.9, 0.95)
_PRIOR_WEIGHT: Final = 1.0


def level_of(strength: int) -> int:
    """Return the level of a strength: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more."""
    return min(strength.bit_length(), NUM_LEVELS - 1)


class Acceptance:
    """Shares of right drafts of one sequence, by level, in which older ones fade.

    A draft counts whether a row was spent on it or not: what the target drew is known either way.
    So learning costs no time, and text that begins to repeat is noticed at once.
    """

    __slots__ = ("_num_drafts", "_num_right")

    def __init__(self) -> None:
        self._num_right = [share * _PRIOR_WEIGHT for share in _PRIOR]
        self._num_drafts = [_PRIOR_WEIGHT] * NUM_LEVELS

    def share(self, strength: int) -> float:
        """Return the expected chance, in (0, 1), that a draft of this strength is right."""
        level = level_of(strength)
        return self._num_right[level] / self._num_drafts[level]

    def learn(self, strength: int, *, is_right: bool) -> None:
        """Count a draft."""
        level = level_of(strength)
        self._num_right[level] = self._num_right[level] * _DECAY + is_right
        self._num_drafts[level] = self._num_drafts[level] * _DECAY + 1.0

    def learn_run(self, strength: int, drafts: tuple[int, ...], drawn: tuple[int, ...]) -> int:
        """Count the drafts of a proposal up to the first wrong one; return how many were right.

        Args:
            strength: That of the first draft.
            drafts: The proposal.
            drawn: The tokens that came, the first one in the place of the first draft.
        """
        num_right = 0
        for draft, token in zip(drafts, drawn, strict=False):
            self.learn(strength + num_right, is_right=draft == token)
            if draft != token:
                break
            num_right += 1
        return num_right
