"""Drafts by the executor's draft model: what it has of each sequence, and what it proposed last.

The draft model computes in the executor, so its proposals come by messages: `row` says what to ask
for a sequence, `take` notes the answer, and `propose` gives it out while the sequence still ends
where it ended then. What the executor has of a sequence may be lost at any time; its answer says
where to start again.

A small model makes little of what lies far back, and reading it would cost time before anything is
gained. So the draft model begins a few tokens before the end of the prompt, and begins anew there
when it was not asked for as long: no request costs more than these tokens. To the executor a
sequence begins at that position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler_service.core.request import Request, SequenceId
from scheduler_service.speculation.draft_work import DraftEnd, DraftReply, DraftRow, DraftWork
from scheduler_service.speculation.proposer import NO_PROPOSAL, Proposal, ProposerKind

WINDOW: Final = 128
"""Known tokens that the draft model begins with."""

WAIT_FOR_ROOM: Final = 32
"""Tokens of a sequence before the draft model is asked again that had no room for it."""


@dataclass(slots=True, eq=False)
class _Drafted:
    generation: int
    # Position at which the draft model began.
    base: int = 0
    # Known positions that the draft model has computed.
    num_computed: int = 0
    # The last proposal, and the known tokens that it follows.
    proposal: Proposal = NO_PROPOSAL
    num_tokens: int = 0
    # It is not asked before the sequence has so many tokens.
    not_before: int = 0
    has_failed: bool = False


class DraftModelProposer:
    """The sequences of one draft model."""

    kind = ProposerKind.DRAFT

    def __init__(self, max_rows: int, max_tokens: int, context_length: int) -> None:
        """Ask for at most `max_rows` sequences and carry at most `max_tokens` at a time.

        The draft model has `context_length` positions.
        """
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self._context_length = context_length
        self._window = min(WINDOW, max_tokens, max(1, context_length // 2))
        self._sequences: dict[SequenceId, _Drafted] = {}

    def __len__(self) -> int:
        """Return how many sequences something is kept for."""
        return len(self._sequences)

    def _of(self, request: Request) -> _Drafted:
        known = self._sequences.get(request.sequence_id)
        if known is None or known.generation != request.generation:
            known = self._sequences[request.sequence_id] = _Drafted(request.generation)
        return known

    def num_missing(self, request: Request) -> int:
        """Return how many known tokens the draft model has yet to compute, one at least.

        Of its last proposal it has computed all tokens but the last.
        """
        known = self._of(request)
        if self._begins_anew(request, known):
            return min(self._window, request.num_tokens)
        missing = request.num_tokens - known.num_computed
        if known.num_tokens == known.num_computed:
            drafts = known.proposal.token_ids[:-1]
            drawn = request.tokens(known.num_tokens, known.num_tokens + len(drafts))
            for draft, token in zip(drafts, drawn, strict=False):
                if draft != token:
                    break
                missing -= 1
        return max(1, missing)

    def _begins_anew(self, request: Request, known: _Drafted) -> bool:
        num_tokens = request.num_tokens
        return (
            num_tokens - known.num_computed > self._window
            or num_tokens - known.base > self._context_length
        )

    def can_draft(self, request: Request) -> bool:
        """Return whether it makes sense to ask: not after a failure, nor for what is known."""
        known = self._of(request)
        return (
            not known.has_failed
            and request.num_tokens >= known.not_before
            and known.num_tokens != request.num_tokens
        )

    def row(self, request: Request, max_drafts: int, min_confidence: float = 0.0) -> DraftRow:
        """Return what to ask for a live request."""
        known = self._of(request)
        if self._begins_anew(request, known):
            known.base = known.num_computed = max(0, request.num_tokens - self._window)
        start = min(known.num_computed, request.num_tokens - 1)
        return DraftRow(
            sequence_id=request.sequence_id,
            generation=request.generation,
            start_position=start - known.base,
            token_ids=request.tokens(start, request.num_tokens),
            max_drafts=max_drafts,
            min_confidence=min_confidence,
        )

    def take(self, work: DraftWork, reply: DraftReply) -> None:
        """Note the answer to work."""
        for row, came in zip(work.rows, reply.rows, strict=True):
            known = self._sequences.get(row.sequence_id)
            if known is None or known.generation != row.generation:
                continue
            known.num_computed = known.base + came.num_computed
            match came.end:
                case DraftEnd.FAILED:
                    known.has_failed = True
                case DraftEnd.NO_CAPACITY:
                    known.not_before = known.base + row.end + WAIT_FOR_ROOM
                case DraftEnd.COMPUTED if row.max_drafts:
                    known.proposal = Proposal(
                        came.token_ids, kind=self.kind, confidences=came.confidences
                    )
                    known.num_tokens = known.base + row.end
                case _:
                    pass

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return what the draft model proposed last, if nothing has been drawn since."""
        known = self._of(request)
        if known.num_tokens != request.num_tokens or not known.proposal.token_ids:
            return NO_PROPOSAL
        proposal = known.proposal
        if len(proposal.token_ids) <= max_tokens:
            return proposal
        return Proposal(
            proposal.token_ids[:max_tokens],
            kind=self.kind,
            confidences=proposal.confidences[:max_tokens],
        )

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence."""
        self._sequences.pop(sequence_id, None)
