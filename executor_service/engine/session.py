"""The state of the one live session: whose it is, its open sequences and its steps.

Runs on the engine thread. A session is named by its scheduler's epoch. Starting one with a higher
epoch drops every sequence (what the prefix index knows stays: it belongs to the process); starting
one with the same epoch takes over from a broken stream with all state kept, so that a repeated step
is answered from memory. Whoever started last holds the ticket;
requests with an older one are fenced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from executor_service.engine.open_sequences import OpenSequences
from executor_service.engine.provenance_report import ProvenanceReport, ProvenanceReports
from executor_service.engine.session_steps import SessionSteps
from executor_service.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    SessionFencedError,
    StaleEpochError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.drafting.drafter import Drafter
    from executor_service.drafting.request import DraftAnswer, DraftRow
    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.open_sequences import Opening
    from executor_service.engine.step_in_flight import StepInFlight
    from executor_service.engine.step_request import Int32, Limits, StepAnswer, StepRequest
    from executor_service.kv_cache.manager import KvCacheManager, KvOccupancy


class Session:
    """Sequences and steps of the scheduler that holds the ticket."""

    def __init__(
        self,
        model_id: str,
        runner: ModelRunner,
        cache: KvCacheManager,
        limits: Limits,
        drafter: Drafter | None = None,
    ) -> None:
        """Serve one model; `drafter` proposes tokens for it and holds no sequence beyond its."""
        self._drafter = drafter
        self._model_id = model_id
        self._runner = runner
        self._cache = cache
        self._reports = ProvenanceReports(cache, runner.read_block)
        released = (lambda _: None) if drafter is None else drafter.release
        self._sequences = OpenSequences(cache, limits.max_num_seqs, released)
        self._steps = SessionSteps(runner, cache, self._sequences, limits)
        self._scheduler_epoch = 0
        self._ticket = 0

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def occupancy(self) -> KvOccupancy:
        """Return the counts of blocks."""
        return self._cache.occupancy()

    def start(self, scheduler_epoch: int) -> int:
        """Start or take over a session and return its ticket; raises StaleEpochError."""
        if scheduler_epoch < 1:
            raise InvalidRequestError(
                f"[start] scheduler_epoch must be at least 1, got {scheduler_epoch}"
            )
        if scheduler_epoch < self._scheduler_epoch:
            raise StaleEpochError(
                f"[start] scheduler_epoch must be at least {self._scheduler_epoch}, "
                f"got {scheduler_epoch}",
                {"scheduler_epoch": str(self._scheduler_epoch)},
            )
        if scheduler_epoch > self._scheduler_epoch:
            self._scheduler_epoch = scheduler_epoch
            self._steps.forget()
            self._sequences.release_all()
            self._cache.provenance.begin_epoch(scheduler_epoch)
        self._ticket += 1
        return self._ticket

    def end(self) -> None:
        """Give every sequence back: the process ends."""
        self._sequences.release_all()

    def open(self, ticket: int, openings: Sequence[Opening]) -> list[int]:
        """Open sequences and return the cached positions of each; all are opened or none."""
        self._check_ticket(ticket)
        for opening in openings:
            self._check_model(opening.model_id)
        return self._sequences.open(openings)

    def release(self, ticket: int, sequence_ids: Sequence[int]) -> None:
        """Give sequences back; unknown ones are ignored."""
        self._check_ticket(ticket)
        self._sequences.release(sequence_ids)

    def begin_step(self, ticket: int, request: StepRequest, arrived_ns: int) -> StepInFlight:
        """Begin a step, or find the answer to a repeated one; `finish` of it waits for that.

        A step that is refused with an error changes nothing. `arrived_ns` is
        `time.perf_counter_ns` at its arrival.
        """
        self._check_ticket(ticket)
        self._check_model(request.model_id)
        return self._steps.begin(request, arrived_ns)

    def step(self, ticket: int, request: StepRequest, arrived_ns: int) -> StepAnswer:
        """Compute a step, or answer a repeated one from memory."""
        return self.begin_step(ticket, request, arrived_ns).finish()

    def provenance(
        self,
        sequence_id: int,
        generation: int,
        num_positions: int = 0,
        *,
        include_digests: bool = False,
    ) -> ProvenanceReport:
        """Return who wrote an open sequence's positions; raises RecordNotKeptError.

        With `num_positions`, at most that many of the first ones.
        """
        known = self._sequences.of_generation(sequence_id, generation)
        most = num_positions or known.num_computed_tokens
        count = min(most, known.num_computed_tokens)
        return self._reports.of_sequence(sequence_id, count, include_digests)

    def provenance_of(self, handle: int, *, include_digests: bool = False) -> ProvenanceReport:
        """Return what a step or an opening gave a handle for; raises RecordNotKeptError."""
        number, is_opening = divmod(handle, 2)
        if not is_opening:
            return self._reports.of_step(number)
        known = self._sequences.of_handle(number, handle)
        return self._reports.of_sequence(number, known.num_cached_tokens, include_digests)

    def fetch_logits(
        self, ticket: int, step_id: int, wanted_indexes: Int32, max_bytes: int
    ) -> bytes:
        """Return full rows of the last step, fp32 bytes; raises LogitsNotKeptError."""
        self._check_ticket(ticket)
        return self._runner.logits(step_id, wanted_indexes, max_bytes)

    def draft(self, ticket: int, request: Sequence[DraftRow], queue_ns: int) -> DraftAnswer:
        """Let the draft model propose tokens; nothing of the target changes.

        Raises InvalidRequestError without a draft model, or for a malformed request.
        """
        self._check_ticket(ticket)
        if self._drafter is None:
            raise InvalidRequestError("[draft] the executor must have a draft model, got none")
        return replace(self._drafter.draft(request, self._sequences.is_open), queue_ns=queue_ns)

    def check_integrity(self) -> None:
        """Raise AssertionError when sequences and cache disagree."""
        self._sequences.check_integrity()
        if self._drafter is not None:
            self._drafter.check_integrity()

    def _check_ticket(self, ticket: int) -> None:
        if ticket != self._ticket:
            raise SessionFencedError("[session] another session has taken over, got the old one")

    def _check_model(self, model_id: str) -> None:
        if model_id not in ("", self._model_id):
            raise ModelNotFoundError(
                f"[session] model_id must be {self._model_id}, got {model_id}",
                {"model_id": model_id},
            )
