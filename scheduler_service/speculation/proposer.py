"""What a proposer is: it drafts the tokens that follow, and only speed depends on its drafts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from scheduler_service.core.request import Request, SequenceId


class ProposerKind(StrEnum):
    """Kinds of proposers; the values are labels of metrics."""

    LOOKUP = "lookup"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of the next tokens of one sequence.

    Attributes:
        token_ids: The tokens, the next one first; empty for none.
        strength: How much speaks for the first of them, in tokens: for a lookup, how many tokens
            before it agree. The i-th token counts as `strength + i`, because by the time it is
            looked at the ones before it have been found right.
        kind: Who made it.
        confidences: Of a draft model: its probability of each token.
    """

    token_ids: tuple[int, ...] = ()
    strength: int = 0
    kind: ProposerKind = ProposerKind.LOOKUP
    confidences: tuple[float, ...] = ()


NO_PROPOSAL: Final = Proposal()


class Proposer(Protocol):
    """Drafts tokens. A wrong draft costs time and changes no token."""

    @property
    def kind(self) -> ProposerKind:
        """Its kind, for counts."""
        ...

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return at most `max_tokens` tokens to follow all known tokens of a live request."""
        ...

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of what is kept for a sequence; unknown ones are ignored."""
        ...
