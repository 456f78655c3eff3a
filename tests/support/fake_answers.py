"""Packed arrays of a fake executor's messages."""

from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from isobatch.executor.v1 import token_rows_pb2
from scheduler_service.sampling import RowStatistics, Statistic


def array(data: bytes, dtype: str) -> list[Any]:
    """Return packed numbers as a list."""
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def pack_statistics(
    result: token_rows_pb2.StepResult, flags: list[Statistic], answers: list[RowStatistics]
) -> None:
    """Fill in what was asked for, and the contract's stand-ins for what was not."""

    def pick(flag: Statistic, values: list[Any], default: float, dtype: str) -> bytes:
        chosen = [v if flag in f else default for f, v in zip(flags, values, strict=True)]
        return np.array(chosen, dtype).tobytes()

    result.argmax_ids = pick(Statistic.ARGMAX, [a.argmax_id for a in answers], -1, "<i4")
    result.quantile_ids = pick(Statistic.QUANTILE, [a.quantile_id for a in answers], -1, "<i4")
    result.normalizers = pick(Statistic.NORMALIZER, [a.normalizer for a in answers], 0, "<f4")
    result.max_logits = np.array([a.max_logit for a in answers], "<f4").tobytes()
    tops = [a for f, a in zip(flags, answers, strict=True) if Statistic.TOP_K in f]
    counts = [
        len(a.top_k_ids) if Statistic.TOP_K in f and a.top_k_ids is not None else 0
        for f, a in zip(flags, answers, strict=True)
    ]
    result.top_k_starts = np.cumsum([0, *counts]).astype("<i4").tobytes()
    result.top_k_ids = b"".join(a.top_k_ids.tobytes() for a in tops if a.top_k_ids is not None)
    result.top_k_logits = b"".join(
        a.top_k_logits.tobytes() for a in tops if a.top_k_logits is not None
    )
    result.top_k_weights = b"".join(
        a.top_k_weights.tobytes() for a in tops if a.top_k_weights is not None
    )


async def abort_stale(context: Any, last_epoch: int, *, has_session: bool) -> None:
    """Refuse a session as the contract says, naming the epoch that is too high for it."""
    metadata = {"scheduler_epoch": str(last_epoch), "has_session": str(has_session).lower()}
    info = error_details_pb2.ErrorInfo(reason="STALE_EPOCH", domain="isobatch", metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=9, message="stale", details=[detail])
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        "stale",
        (("grpc-status-details-bin", status.SerializeToString()),),
    )
