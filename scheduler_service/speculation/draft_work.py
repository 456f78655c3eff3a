"""Work of the executor's draft model, and what came of it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler_service.core.request import SequenceId


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What the draft model is asked for one sequence.

    Attributes:
        sequence_id: The sequence.
        generation: Generation of its cached state.
        start_position: Position of the first carried token.
        token_ids: Known tokens from there on, at least one.
        max_drafts: Most tokens to draft; 0 where it is only to catch up.
        min_confidence: Drafting ends with the token at which the product of confidences falls
            below this.
    """

    sequence_id: SequenceId
    generation: int
    start_position: int
    token_ids: tuple[int, ...]
    max_drafts: int
    min_confidence: float = 0.0

    @property
    def end(self) -> int:
        """Position behind the last carried token."""
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One request to the draft model.

    Attributes:
        rows: The sequences.
        expected_seconds: What its passes are expected to take, without the way there and back.
    """

    rows: tuple[DraftRow, ...]
    expected_seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Passes that it may take."""
        return max(1, *(row.max_drafts for row in self.rows))


class DraftEnd(Enum):
    """How a row ended; see the contract's DraftOutcome."""

    COMPUTED = "computed"
    BEHIND = "behind"
    NO_CAPACITY = "no_capacity"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """The answer for one row.

    Attributes:
        end: How it ended.
        num_computed: Known positions that the draft model has.
        token_ids: The drafted tokens.
        confidences: The draft model's probability of each, in 0..1.
    """

    end: DraftEnd
    num_computed: int
    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReply:
    """The answer to a DraftWork.

    Attributes:
        rows: By row.
        pass_seconds: What all passes took.
    """

    rows: tuple[DraftedRow, ...]
    pass_seconds: float = 0.0
