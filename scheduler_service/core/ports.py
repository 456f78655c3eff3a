"""Seams of the core: what a step loop needs from the outside.

The core itself calls none of these; it is handed their results. They stand here so that the
step loop, its fakes and its tests agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol, TypeVar

from scheduler_service.core.batch import SampledRow, TokenRowBatch
from scheduler_service.core.request import RequestId

AnswerT_co = TypeVar("AnswerT_co", covariant=True)
AnswerT_contra = TypeVar("AnswerT_contra", contravariant=True)


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        ...


class Executor(Protocol[AnswerT_co]):
    """Runs steps of token rows."""

    def step(self, batch: TokenRowBatch) -> Awaitable[AnswerT_co]:
        """Apply the releases, grow the cache for all rows or none, and compute the rows."""
        ...


class Sampler(Protocol[AnswerT_contra]):
    """Chooses tokens from an executor's answer."""

    def sample(
        self, batch: TokenRowBatch, answer: AnswerT_contra
    ) -> Awaitable[Mapping[RequestId, SampledRow]]:
        """Return what came of each row that wanted a token or failed."""
        ...
