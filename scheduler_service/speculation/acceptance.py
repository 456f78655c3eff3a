"""How often drafts have been right, by how much spoke for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scheduler_service.speculation.proposer import Proposal, ProposerKind

NUM_LEVELS: Final = 7
_DECAY: Final = 0.93
_PRIOR: Final = (0.4, 0.4, 0.45, 0.65, 0.8, 0.9, 0.95)
_PRIOR_WEIGHT: Final = 1.0
# Borders of the levels of a draft model's probabilities.
_CONFIDENCES: Final = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
DRAFT_PRIOR: Final = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92)


def level_of(strength: int) -> int:
    """Return the level of a strength: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more."""
    return min(strength.bit_length(), NUM_LEVELS - 1)


def draft_level(proposal: Proposal, index: int) -> int:
    """Return the level of a proposal's draft: by agreeing tokens, or by confidence."""
    if proposal.kind is ProposerKind.LOOKUP:
        return level_of(proposal.strength + index)
    return sum(proposal.confidences[index] >= border for border in _CONFIDENCES)


class Acceptance:
    """Shares of right drafts of one sequence, by level, in which older ones fade.

    A draft counts whether a row was spent on it or not: what the target drew is known either way.
    So learning costs no time, and text that begins to repeat is noticed at once.
    """

    __slots__ = ("_decay", "_num_drafts", "_num_right")

    def __init__(
        self,
        prior: Sequence[float] = _PRIOR,
        weight: float = _PRIOR_WEIGHT,
        decay: float = _DECAY,
    ) -> None:
        """Begin with the shares `prior` by level, which count as `weight` drafts each."""
        self._decay = decay
        self._num_right = [share * weight for share in prior]
        self._num_drafts = [weight] * len(prior)

    def share(self, strength: int) -> float:
        """Return the expected chance, in (0, 1), that a draft of this strength is right."""
        return self.share_at(level_of(strength))

    def share_at(self, level: int) -> float:
        """Return the expected chance, in (0, 1), that a draft of this level is right."""
        return self._num_right[level] / self._num_drafts[level]

    def shares(self) -> list[float]:
        """Return the expected chances by level."""
        return [self.share_at(level) for level in range(len(self._num_drafts))]

    def learn(self, strength: int, *, is_right: bool) -> None:
        """Count a draft of this strength."""
        self.learn_at(level_of(strength), is_right=is_right)

    def learn_at(self, level: int, *, is_right: bool) -> None:
        """Count a draft of this level."""
        self._num_right[level] = self._num_right[level] * self._decay + is_right
        self._num_drafts[level] = self._num_drafts[level] * self._decay + 1.0

    def learn_run(self, strength: int, drafts: tuple[int, ...], drawn: tuple[int, ...]) -> int:
        """Count the drafts of a lookup up to the first wrong one; return how many were right.

        Args:
            strength: That of the first draft.
            drafts: The proposal.
            drawn: The tokens that came, the first one in the place of the first draft.
        """
        return self.learn_proposal(Proposal(drafts, strength), drawn)

    def learn_proposal(self, proposal: Proposal, drawn: tuple[int, ...]) -> int:
        """Count the drafts of a proposal up to the first wrong one; return how many were right."""
        num_right = 0
        for draft, token in zip(proposal.token_ids, drawn, strict=False):
            self.learn_at(draft_level(proposal, num_right), is_right=draft == token)
            if draft != token:
                break
            num_right += 1
        return num_right
