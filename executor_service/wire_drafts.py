"""The contract's messages for the draft model's work, to the engine's values and back."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from executor_service.drafting.request import DraftRow
from executor_service.errors import InvalidRequestError
from isobatch.executor.v1 import drafts_pb2, token_rows_pb2
from isobatch.executor.v1 import executor_service_pb2 as service_pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from executor_service.drafting.request import DraftAnswer


def read_draft(message: drafts_pb2.DraftTokens) -> list[DraftRow]:
    """Decode a request; raises InvalidRequestError for an array of the wrong length."""
    ids = _numbers("row_sequence_ids", message.row_sequence_ids, "Q")
    count = len(ids)
    lengths = _numbers("row_num_tokens", message.row_num_tokens, "i", count)
    token_ids = _numbers("token_ids", message.token_ids, "i", sum(lengths))
    return [
        DraftRow(*row)
        for row in zip(
            ids,
            _numbers("row_generations", message.row_generations, "I", count),
            _numbers("row_start_positions", message.row_start_positions, "i", count),
            _pieces(token_ids, lengths),
            _numbers("row_max_drafts", message.row_max_drafts, "i", count),
            _numbers("row_min_confidences", message.row_min_confidences, "f", count),
            strict=True,
        )
    ]


def _pieces(values: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut values into pieces; of a negative length comes none, which is refused later."""
    start = 0
    for length in lengths:
        yield values[start : start + max(0, length)]
        start += length


def _numbers(field: str, data: bytes, code: str, count: int | None = None) -> tuple[Any, ...]:
    """Unpack `count` numbers, or any whole number of them."""
    size = struct.calcsize(code)
    number, rest = divmod(len(data), size)
    if rest or (count is not None and number != count):
        wanted = "whole" if count is None else f"{count}"
        raise InvalidRequestError(
            f"[draft] {field} must be {wanted} elements of {size} bytes, got {len(data)} bytes",
            {"field": field},
        )
    return struct.unpack(f"<{number}{code}", data)


def _pack(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def drafted(answer: DraftAnswer, total_ns: int) -> service_pb.SessionResponse:
    """Encode an answer; `total_ns` is the time since the request arrived."""
    rows = answer.rows
    return service_pb.SessionResponse(
        drafted=drafts_pb2.TokensDrafted(
            row_outcomes=bytes(row.outcome for row in rows),
            row_num_computed=_pack("i", [row.num_computed for row in rows]),
            row_num_drafts=_pack("i", [len(row.token_ids) for row in rows]),
            token_ids=_pack("i", [token for row in rows for token in row.token_ids]),
            confidences=_pack("f", [each for row in rows for each in row.confidences]),
            timings=token_rows_pb2.StepTimings(
                queue_ns=answer.queue_ns, forward_ns=answer.forward_ns, total_ns=total_ns
            ),
        )
    )
