"""Work of the draft model as the engine sees it, and its answer.

Plain arrays: generated messages stop at `wire_drafts`. S is the number of rows, T the number of
carried tokens, D the number of drafted ones.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from executor_service.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor_service.engine.step_request import Float32, Int32, UInt8, UInt32, UInt64

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


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One request, decoded; lengths agree, values are checked by `check_draft`."""

    sequence_ids: UInt64  # (S,)
    generations: UInt32  # (S,)
    start_positions: Int32  # (S,)
    num_tokens: Int32  # (S,)
    max_drafts: Int32  # (S,)
    min_confidences: Float32  # (S,)
    token_ids: Int32  # (T,)


@dataclass(frozen=True, slots=True, eq=False)
class DraftAnswer:
    """What came of it."""

    outcomes: UInt8  # (S,) DraftOutcome
    num_computed: Int32  # (S,) known positions that the draft model has computed
    num_drafts: Int32  # (S,)
    token_ids: Int32  # (D,)
    confidences: Float32  # (D,)
    forward_ns: int = 0
    queue_ns: int = 0


def check_draft(request: DraftRequest, limits: DraftLimits) -> None:
    """Raise InvalidRequestError naming the first field that breaks a rule."""

    def require(holds: bool, field: str, rule: str, got: object) -> None:
        if not holds:
            raise InvalidRequestError(f"[draft] {field} {rule}, got {got}", {"field": field})

    rows, ids = len(request.sequence_ids), request.sequence_ids.tolist()
    most = limits.max_num_seqs
    require(1 <= rows <= most, "row_sequence_ids", f"must have 1..{most} rows", rows)
    require(len(set(ids)) == rows, "row_sequence_ids", "must be different", ids)
    _in_range(request.start_positions, 0, 2**31 - 1, "row_start_positions", require)
    _in_range(request.num_tokens, 1, 2**31 - 1, "row_num_tokens", require)
    total = int(request.num_tokens.sum(dtype=np.int64))
    require(total == len(request.token_ids), "token_ids", f"must have {total} elements",
            len(request.token_ids))  # fmt: skip
    most = limits.max_num_batched_tokens
    require(total <= most, "token_ids", f"must have at most {most} elements", total)
    _in_range(request.max_drafts, 0, MAX_DRAFTS, "row_max_drafts", require)
    confidences = request.min_confidences
    is_share = bool(((confidences >= 0) & (confidences <= 1)).all())
    require(is_share, "row_min_confidences", "must be in 0..1", confidences.tolist())
    _in_range(request.token_ids, 0, limits.vocab_size - 1, "token_ids", require)


def _in_range(
    values: Int32, least: int, most: int, field: str, require: Callable[[bool, str, str, int], None]
) -> None:
    low, high = int(values.min()), int(values.max())
    require(low >= least, field, f"must be at least {least}", low)
    require(high <= most, field, f"must be at most {most}", high)
