"""The contract's messages for the draft model's work, to the engine's values and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from executor_service.drafting.request import DraftRequest
from executor_service.errors import InvalidRequestError
from isobatch.executor.v1 import drafts_pb2, token_rows_pb2
from isobatch.executor.v1 import executor_service_pb2 as service_pb

if TYPE_CHECKING:
    import numpy.typing as npt

    from executor_service.drafting.request import DraftAnswer

_Scalar = TypeVar("_Scalar", bound=np.generic)


def read_draft(message: drafts_pb2.DraftTokens) -> DraftRequest:
    """Decode a request; raises InvalidRequestError for an array of the wrong length."""
    ids = _array("row_sequence_ids", message.row_sequence_ids, np.dtype("<u8"))
    count = len(ids)
    return DraftRequest(
        sequence_ids=ids,
        generations=_array("row_generations", message.row_generations, np.dtype("<u4"), count),
        start_positions=_array(
            "row_start_positions", message.row_start_positions, np.dtype("<i4"), count
        ),
        num_tokens=_array("row_num_tokens", message.row_num_tokens, np.dtype("<i4"), count),
        max_drafts=_array("row_max_drafts", message.row_max_drafts, np.dtype("<i4"), count),
        min_confidences=_array(
            "row_min_confidences", message.row_min_confidences, np.dtype("<f4"), count
        ),
        token_ids=_array("token_ids", message.token_ids, np.dtype("<i4")),
    )


def _array(
    field: str, data: bytes, dtype: np.dtype[_Scalar], count: int | None = None
) -> npt.NDArray[_Scalar]:
    """Read an array of `count` elements, or of any whole number of them."""
    size, rest = divmod(len(data), dtype.itemsize)
    if rest or (count is not None and size != count):
        wanted = "whole" if count is None else f"{count}"
        raise InvalidRequestError(
            f"[draft] {field} must be {wanted} elements of {dtype.itemsize} bytes, "
            f"got {len(data)} bytes",
            {"field": field},
        )
    return np.frombuffer(data, dtype)


def drafted(answer: DraftAnswer, total_ns: int) -> service_pb.SessionResponse:
    """Encode an answer; `total_ns` is the time since the request arrived."""
    return service_pb.SessionResponse(
        drafted=drafts_pb2.TokensDrafted(
            row_outcomes=answer.outcomes.tobytes(),
            row_num_computed=answer.num_computed.astype("<i4", copy=False).tobytes(),
            row_num_drafts=answer.num_drafts.astype("<i4", copy=False).tobytes(),
            token_ids=answer.token_ids.astype("<i4", copy=False).tobytes(),
            confidences=answer.confidences.astype("<f4", copy=False).tobytes(),
            timings=token_rows_pb2.StepTimings(
                queue_ns=answer.queue_ns, forward_ns=answer.forward_ns, total_ns=total_ns
            ),
        )
    )
