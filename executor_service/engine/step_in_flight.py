"""A step between its beginning and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.engine.open_sequences import SequenceState
    from executor_service.engine.step_request import Int32, StepAnswer, StepRequest
    from isobatch_kernels.step import PendingStep

_NO_TABLES = np.zeros((0, 1), np.int32)


class Finisher(Protocol):
    """Who knows in which order steps finish."""

    def finish(self, step: StepInFlight) -> StepAnswer:
        """Wait for the oldest step in flight and return its answer."""
        ...


class StepInFlight:
    """What was decided when a step began. Used on the engine thread."""

    __slots__ = (
        "_before", "_finisher", "answer", "arrived_ns", "ends", "has_unknown_tokens",
        "is_postponed", "pending", "poisoned", "prepare_ns", "queue_ns", "request", "rows",
        "tables", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: StepRequest,
        finisher: Finisher,
        *,
        arrived_ns: int = 0,
        answer: StepAnswer | None = None,
    ) -> None:
        """Begin with nothing decided; `answer` is that of a step that is repeated."""
        self.request = request
        self.arrived_ns = arrived_ns
        # Known already where there is nothing to compute.
        self.answer = answer
        # Nothing of it is decided before the step ahead of it is done.
        self.is_postponed = False
        # (T,), and whether some of them are still to come from the step ahead.
        self.token_ids: Int32 = request.token_ids
        self.has_unknown_tokens = False
        # Rows whose token was chosen by a row that was not finite.
        self.poisoned: Sequence[int] = ()
        self.rows: list[SequenceState] = []
        self.ends: list[int] = []
        self.tables: Int32 = _NO_TABLES
        self.pending: PendingStep | None = None
        self.queue_ns = self.prepare_ns = 0
        self._finisher = finisher
        self._before: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether a device computes it while nobody waits for it."""
        return self.pending is not None and self.pending.is_running

    @property
    def size(self) -> int:
        """Its tokens."""
        return len(self.token_ids)

    def take(self, rows: list[SequenceState], ends: list[int]) -> None:
        """Count the rows' positions as computed: the next step may begin behind them."""
        self.rows, self.ends = rows, ends
        self._before = [sequence.num_computed_tokens for sequence in rows]
        for sequence, end in zip(rows, ends, strict=True):
            sequence.num_computed_tokens = end

    def give_back(self) -> None:
        """Undo `take`."""
        for sequence, before in zip(self.rows, self._before, strict=True):
            sequence.num_computed_tokens = before

    def finish(self) -> StepAnswer:
        """Wait for its results; steps finish in the order in which they began."""
        return self._finisher.finish(self)
