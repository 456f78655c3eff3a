"""What the core tells the shell. Values only; the shell turns them into messages and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from scheduler_service.core.request import FinishReason, RequestId


class PreemptionReason(Enum):
    """Why a request lost its cached state."""

    CAPACITY = "capacity"
    PRIORITY = "priority"
    PAUSED = "paused"
    EXECUTOR_RESTART = "executor_restart"
    NON_FINITE_DRAFT = "non_finite_draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdmitted:
    """A request got its first row, or its first again after a preemption.

    Attributes:
        request_id: The request.
        queue_seconds: Time since its arrival.
        is_readmission: True when it had been preempted.
        num_cached_tokens: Known tokens that the executor's prefix cache held.
    """

    request_id: RequestId
    queue_seconds: float
    is_readmission: bool
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted:
    """A request lost its cached state and waits to be recomputed; its tokens are kept.

    Attributes:
        request_id: The request.
        num_lost_tokens: Computed tokens that have to be computed again.
        reason: Why.
    """

    request_id: RequestId
    num_lost_tokens: int
    reason: PreemptionReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEmitted:
    """A request has a new token. A token that ends the request is emitted as well.

    Attributes:
        request_id: The request.
        token_id: The token.
        index: Index in the request's output, from 0.
    """

    request_id: RequestId
    token_id: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request ended. Exactly one for each submitted request, and nothing after it.

    Attributes:
        request_id: The request.
        reason: Why.
        stop_token_id: The token that ended it, where one did.
        detail: What went wrong, in words; empty unless the reason is ERROR.
    """

    request_id: RequestId
    reason: FinishReason
    stop_token_id: int | None = None
    detail: str = ""


Event: TypeAlias = RequestAdmitted | RequestPreempted | TokenEmitted | RequestFinished
