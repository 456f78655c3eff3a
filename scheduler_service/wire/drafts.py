"""The draft model's work as messages, and its answers as checked values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from isobatch.executor.v1 import drafts_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from scheduler_service.speculation import DraftedRow, DraftEnd, DraftReply, DraftWork
from scheduler_service.wire.capabilities import WireError

_ENDS: Final = {
    drafts_pb2.DRAFT_OUTCOME_COMPUTED: DraftEnd.COMPUTED,
    drafts_pb2.DRAFT_OUTCOME_BEHIND: DraftEnd.BEHIND,
    drafts_pb2.DRAFT_OUTCOME_NO_CAPACITY: DraftEnd.NO_CAPACITY,
    drafts_pb2.DRAFT_OUTCOME_FAILED: DraftEnd.FAILED,
}


def _pack(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def draft(work: DraftWork) -> pb.SessionRequest:
    """Return the message that asks the draft model for tokens."""
    rows = work.rows
    return pb.SessionRequest(
        draft=drafts_pb2.DraftTokens(
            row_sequence_ids=_pack("Q", [row.sequence_id for row in rows]),
            row_generations=_pack("I", [row.generation for row in rows]),
            row_start_positions=_pack("i", [row.start_position for row in rows]),
            row_num_tokens=_pack("i", [len(row.token_ids) for row in rows]),
            row_max_drafts=_pack("i", [row.max_drafts for row in rows]),
            row_min_confidences=_pack("f", [row.min_confidence for row in rows]),
            token_ids=_pack("i", [token for row in rows for token in row.token_ids]),
        )
    )


def read_drafted(response: pb.SessionResponse, work: DraftWork, vocab_size: int) -> DraftReply:
    """Return the answer to `draft(work)`; drafted ids are below `vocab_size`.

    Raises WireError.
    """
    got = response.WhichOneof("message")
    if got != "drafted":
        raise WireError(f"[session] the answer must be drafted, got {got}")
    message, rows = response.drafted, work.rows
    count = len(rows)
    outcomes = _numbers("row_outcomes", message.row_outcomes, "B", count)
    computed = _numbers("row_num_computed", message.row_num_computed, "i", count)
    num_drafts = _numbers("row_num_drafts", message.row_num_drafts, "i", count)
    for row, outcome, known, drafts in zip(rows, outcomes, computed, num_drafts, strict=True):
        _require(outcome in _ENDS, "row_outcomes must be known", outcome)
        _require(0 <= known <= row.end, f"row_num_computed must be in 0..{row.end}", known)
        most = row.max_drafts
        _require(0 <= drafts <= most, f"row_num_drafts must be in 0..{most}", drafts)
    total = sum(num_drafts)
    token_ids = _numbers("token_ids", message.token_ids, "i", total)
    confidences = _numbers("confidences", message.confidences, "f", total)
    _require(all(0 <= each < vocab_size for each in token_ids),
             f"token_ids must be in 0..{vocab_size - 1}", token_ids)  # fmt: skip
    # A sum of weights is at least that of the best token; rounding may leave it a little below.
    _require(all(0 <= each <= 1.001 for each in confidences), "confidences must be in 0..1",
             confidences)  # fmt: skip
    drafted: list[DraftedRow] = []
    start = 0
    for outcome, known, drafts in zip(outcomes, computed, num_drafts, strict=True):
        stop = start + drafts
        drafted.append(
            DraftedRow(_ENDS[outcome], known, token_ids[start:stop], confidences[start:stop])
        )
        start = stop
    return DraftReply(tuple(drafted), message.timings.forward_ns / 1e9)


def _numbers(name: str, data: bytes, code: str, count: int) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{count}{code}")
    if len(data) != size:
        raise WireError(f"[drafted] {name} must have {size} bytes, got {len(data)}")
    return struct.unpack(f"<{count}{code}", data)


def _require(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise WireError(f"[drafted] {rule}, got {got}")
