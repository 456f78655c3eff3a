"""What a controller of drafts is, and the simplest one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_service.core.request import SequenceId
from scheduler_service.speculation.costs import StepSeconds
from scheduler_service.speculation.draft_choice import Asking, Candidate
from scheduler_service.speculation.draft_costs import DraftCosts
from scheduler_service.speculation.proposer import Proposal


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The step as it would be without drafts.

    A step with drafts makes one wait that would otherwise have been sent ahead of an answer, so its
    cost is `seconds`, and that without drafts is less by `ahead_seconds`.

    Attributes:
        sequence_ids: Sequences that get a token and may have drafts.
        num_room: Drafts that the limits of a step leave room for.
        seconds: Cost of the step by its rows of logits: one for each sequence, one for each draft.
            The step is not sent ahead.
        next_seconds: Cost of a later step of the same sequences, without drafts and prompts.
        spent_seconds: What asking the draft model before the step took.
        ahead_seconds: What a step sent ahead saves; 0 where none would be.
    """

    sequence_ids: Sequence[SequenceId]
    num_room: int
    seconds: StepSeconds
    next_seconds: float
    spent_seconds: float = 0.0
    ahead_seconds: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """Cost without drafts."""
        return self.seconds(len(self.sequence_ids)) - self.ahead_seconds


class Controller(Protocol):
    """Chooses how much of each proposal is tried, and learns from what came of it."""

    @property
    def asks_again(self) -> bool:
        """Whether the draft model may be asked more than once before a step."""
        ...

    def choose(
        self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]
    ) -> dict[SequenceId, int]:
        """Return how many drafts of each proposal go into the step; none for those left out."""
        ...

    def gain(
        self,
        step: PlainStep,
        proposals: Mapping[SequenceId, Proposal],
        chosen: Mapping[SequenceId, int],
    ) -> float:
        """Return what the chosen drafts are expected to save, in seconds of plain steps."""
        ...

    def is_held_back(self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]) -> bool:
        """Return whether some drafts would be tried if accounts allowed it."""
        ...

    def may_wait(self, step: PlainStep) -> bool:
        """Return whether accounts allow not to send a step ahead, so that it may have drafts."""
        ...

    def learn(self, sequence_id: SequenceId, proposal: Proposal, drawn: tuple[int, ...]) -> None:
        """Take in the tokens that came where a proposal was made, however much of it was tried."""
        ...

    def may_ask(self, step: PlainStep, costs: DraftCosts) -> bool:
        """Return whether accounts allow to ask the draft model at all."""
        ...

    def ask(
        self,
        step: PlainStep,
        candidates: Mapping[SequenceId, Candidate],
        costs: DraftCosts,
        *,
        is_trial: bool = False,
    ) -> Asking:
        """Return what to ask of the draft model before the step; a trial notes nothing."""
        ...

    def count_plain(self, sequence_id: SequenceId, plain_seconds: float) -> None:
        """Take in time that a sequence took without drafts: of its prompt, of steps unseen."""
        ...

    def prefers_lookup(self, sequence_id: SequenceId, proposal: Proposal) -> bool:
        """Return whether a lookup's proposal is better than asking the draft model."""
        ...

    def settle(
        self,
        step: PlainStep,
        num_tried: int,
        num_drawn: Mapping[SequenceId, int],
    ) -> None:
        """Book a step with `num_tried` drafts that gave each sequence so many tokens."""
        ...

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of what is kept for a sequence; unknown ones are ignored."""
        ...


class FixedController:
    """Always the same number of drafts, as far as there are so many.

    For tests and comparisons: what is drafted depends on the text alone and on no neighbour.
    """

    asks_again = True

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(
        self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]
    ) -> dict[SequenceId, int]:
        """Return the fixed number, or the whole of a shorter proposal, while there is room."""
        num_room = step.num_room
        chosen: dict[SequenceId, int] = {}
        for sequence_id, proposal in proposals.items():
            chosen[sequence_id] = min(self._num_drafts, len(proposal.token_ids), num_room)
            num_room -= chosen[sequence_id]
        return chosen

    def gain(
        self,
        step: PlainStep,
        proposals: Mapping[SequenceId, Proposal],
        chosen: Mapping[SequenceId, int],
    ) -> float:
        """Expect nothing."""
        return 0.0

    def is_held_back(self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]) -> bool:
        """Hold nothing back."""
        return False

    def may_wait(self, step: PlainStep) -> bool:
        """Wait whatever it costs."""
        return True

    def learn(self, sequence_id: SequenceId, proposal: Proposal, drawn: tuple[int, ...]) -> None:
        """Learn nothing."""

    def may_ask(self, step: PlainStep, costs: DraftCosts) -> bool:
        """Ask whatever it costs."""
        return True

    def ask(
        self,
        step: PlainStep,
        candidates: Mapping[SequenceId, Candidate],
        costs: DraftCosts,
        *,
        is_trial: bool = False,
    ) -> Asking:
        """Return the fixed number for all of them, whatever is missing before that."""
        return Asking(
            {each: min(self._num_drafts, one.max_drafts) for each, one in candidates.items()}
        )

    def count_plain(self, sequence_id: SequenceId, plain_seconds: float) -> None:
        """Keep no accounts."""

    def prefers_lookup(self, sequence_id: SequenceId, proposal: Proposal) -> bool:
        """Prefer one, be it ever so weak."""
        return bool(proposal.token_ids)

    def settle(
        self,
        step: PlainStep,
        num_tried: int,
        num_drawn: Mapping[SequenceId, int],
    ) -> None:
        """Keep no accounts."""

    def forget(self, sequence_id: SequenceId) -> None:
        """Have nothing to let go of."""
