"""Work of the draft model as the engine sees it, and its answer.

Plain values: generated messages stop at `wire_drafts`. There are few rows of few tokens, which
lists serve in less time than arrays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from executor_service.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DRAFTS: Final = 16
"""Most drafted tokens of a row."""


class DraftOutcome(enum.IntEnum):
    """How a row ended; values are those of the contract's DraftOutcome."""

    COMPUTED = 1
    BEHIND = 2
    NO_CAPACITY = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What one request may hold.

    Attributes:
        max_num_seqs: Most rows.
        max_num_batched_tokens: Most carried tokens.
        vocab_size: Ids of the target's tokens are below this.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int


class DraftRow(NamedTuple):
    """What is asked for one sequence; values are checked by `check_draft`."""

    sequence_id: int
    generation: int
    start_position: int
    token_ids: Sequence[int]
    max_drafts: int
    min_confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """What came of a row.

    Attributes:
        outcome: How it ended.
        num_computed: Known positions that the draft model has computed.
        token_ids: The drafted tokens.
        confidences: The draft model's probability of each.
    """

    outcome: DraftOutcome
    num_computed: int
    token_ids: Sequence[int] = ()
    confidences: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """What came of a request's rows."""

    rows: Sequence[DraftedRow]
    forward_ns: int = 0
    queue_ns: int = 0


def check_draft(rows: Sequence[DraftRow], limits: DraftLimits) -> None:
    """Raise InvalidRequestError naming the first field that breaks a rule."""

    def require(holds: bool, field: str, rule: str, got: object) -> None:
        if not holds:
            raise InvalidRequestError(f"[draft] {field} {rule}, got {got}", {"field": field})

    count, most = len(rows), limits.max_num_seqs
    require(1 <= count <= most, "row_sequence_ids", f"must have 1..{most} rows", count)
    is_different = len({row.sequence_id for row in rows}) == count
    require(is_different, "row_sequence_ids", "must be different", [row[0] for row in rows])
    total = 0
    for row in rows:
        start, tokens, drafts = row.start_position, row.token_ids, row.max_drafts
        require(start >= 0, "row_start_positions", "must be at least 0", start)
        require(len(tokens) >= 1, "row_num_tokens", "must be at least 1", len(tokens))
        require(drafts >= 0, "row_max_drafts", "must be at least 0", drafts)
        require(drafts <= MAX_DRAFTS, "row_max_drafts", f"must be at most {MAX_DRAFTS}", drafts)
        least = row.min_confidence
        require(0 <= least <= 1, "row_min_confidences", "must be in 0..1", least)
        require(min(tokens) >= 0, "token_ids", "must be at least 0", min(tokens))
        highest = limits.vocab_size - 1
        require(max(tokens) <= highest, "token_ids", f"must be at most {highest}", max(tokens))
        total += len(tokens)
    most = limits.max_num_batched_tokens
    require(total <= most, "token_ids", f"must have at most {most} elements", total)
