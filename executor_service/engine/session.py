"""The state of the one live session: open sequences, step ids, and the last answer.

Runs on the engine thread. A session is named by its scheduler's epoch. Starting one with a higher
epoch drops every sequence (what the prefix index knows stays: it belongs to the process); starting
one with the same epoch takes over from a broken stream with all state kept, so that a repeated step
is answered from memory. Whoever started last holds the ticket;
requests with an older one are fenced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from executor_service.engine.confirmed import confirmed_ends
from executor_service.engine.provenance_report import (
    ProvenanceReport,
    ProvenanceReports,
    step_handle,
)
from executor_service.engine.step_check import StepChecker
from executor_service.engine.step_request import (
    Outcome,
    RowOutcome,
    Source,
    StepAnswer,
)
from executor_service.errors import (
    InvalidRequestError,
    InvalidStepError,
    ModelNotFoundError,
    RecordNotKeptError,
    SequenceNotOpenError,
    SessionFencedError,
    StaleEpochError,
    StaleGenerationError,
    StepOutOfOrderError,
    TooManySequencesError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.step_request import Int32, Limits, StepRequest, StepResults
    from executor_service.kv_cache.manager import KvCacheManager, KvOccupancy

# Running sequences, the ones that the next step gives back, and room for a scheduler's slack.
OPEN_SEQUENCES_PER_ROW = 4
_STEP_OUTPUT = int(Source.STEP_OUTPUT)
_TOKEN_BYTES = 4  # int32


@dataclass(slots=True, eq=False)
class SequenceState:
    """An open sequence."""

    generation: int
    num_cached_tokens: int  # at its opening
    # Positions in blocks that are, or may be, shared: no row starts before.
    num_fixed_tokens: int
    num_computed_tokens: int
    # Set when a row was not finite: the cached state must not be used again.
    non_finite_detail: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """One sequence of an Open message."""

    sequence_id: int
    generation: int
    model_id: str
    cache_salt: str
    token_ids: Int32
    max_cached_tokens: int


class Session:
    """Sequences and steps of the scheduler that holds the ticket."""

    def __init__(
        self, model_id: str, runner: ModelRunner, cache: KvCacheManager, limits: Limits
    ) -> None:
        self._model_id = model_id
        self._runner = runner
        self._cache = cache
        self._limits = limits
        self._checker = StepChecker(limits)
        self._reports = ProvenanceReports(cache, runner.read_block)
        self._scheduler_epoch = 0
        self._ticket = 0
        self._last_step_id = 0
        self._last_answer: StepAnswer | None = None
        self._sequences: dict[int, SequenceState] = {}

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
                f"got {scheduler_epoch}"
            )
        if scheduler_epoch > self._scheduler_epoch:
            self._scheduler_epoch = scheduler_epoch
            self._last_step_id = 0
            self._last_answer = None
            self._sequences.clear()
            self._cache.release_all()
            self._runner.forget()
            self._cache.provenance.begin_epoch(scheduler_epoch)
        self._ticket += 1
        return self._ticket

    def end(self) -> None:
        """Give every sequence back: the process ends."""
        self._sequences.clear()
        self._cache.release_all()

    def open(self, ticket: int, openings: Sequence[Opening]) -> list[int]:
        """Open sequences and return the cached positions of each; all are opened or none."""
        self._check_ticket(ticket)
        new = {opening.sequence_id for opening in openings} - self._sequences.keys()
        bound = OPEN_SEQUENCES_PER_ROW * self._limits.max_num_seqs
        if len(self._sequences) + len(new) > bound:
            raise TooManySequencesError(
                f"[open] at most {bound} sequences may be open, "
                f"got {len(self._sequences) + len(new)}"
            )
        for opening in openings:
            self._check_model(opening.model_id)
            known = self._sequences.get(opening.sequence_id)
            if known is not None and opening.generation < known.generation:
                raise StaleGenerationError(
                    f"[open] generation of sequence {opening.sequence_id} must be at least "
                    f"{known.generation}, got {opening.generation}"
                )
        return [self._open(opening) for opening in openings]

    def _open(self, opening: Opening) -> int:
        known = self._sequences.get(opening.sequence_id)
        if known is not None and known.generation == opening.generation:
            return known.num_cached_tokens
        self._cache.release([opening.sequence_id])
        cached = self._cache.open(
            opening.sequence_id,
            opening.cache_salt,
            opening.token_ids,
            opening.max_cached_tokens,
        )
        self._sequences[opening.sequence_id] = SequenceState(
            opening.generation, cached, cached, cached
        )
        return cached

    def release(self, ticket: int, sequence_ids: Sequence[int]) -> None:
        """Give sequences back; unknown ones are ignored."""
        self._check_ticket(ticket)
        self._release(sequence_ids)

    def _release(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
        self._cache.release(sequence_ids)

    def step(self, ticket: int, request: StepRequest, queue_ns: int) -> StepAnswer:
        """Compute a step, or answer a repeated one from memory.

        A step that is refused with an error changes nothing.
        """
        started = time.perf_counter_ns()
        self._check_ticket(ticket)
        if request.step_id == self._last_step_id and self._last_answer is not None:
            return self._last_answer
        if request.step_id != self._last_step_id + 1:
            raise StepOutOfOrderError(
                f"[step] step_id must be {self._last_step_id + 1}, got {request.step_id}"
            )
        self._check_model(request.model_id)
        self._checker.check(request)
        rows = self._rows(request)
        token_ids, poisoned = self._resolve_tokens(request)
        if len(request.released):
            self._release(request.released.tolist())
        sequence_ids = request.sequence_ids.tolist()
        ends = (request.start_positions + request.num_tokens).tolist()
        results: StepResults | None = None
        prepare_ns = handle = 0
        if self._cache.grow(dict(zip(sequence_ids, ends, strict=True))):
            outcome = Outcome.COMPUTED
            if rows:
                tables = self._cache.block_tables(sequence_ids)
                prepare_ns = time.perf_counter_ns() - started
                results = self._runner.run(request, token_ids, tables)
                results = self._record(rows, ends, results, poisoned)
                handle = self._record_provenance(request, tables, results)
                if self._cache.index is not None:
                    self._share(request, rows, ends, token_ids)
                    self._cache.note_step(len(token_ids), results.forward_ns * 1e-9)
            else:
                self._runner.forget_logits()
        else:
            outcome = Outcome.NO_CAPACITY
            self._runner.forget_logits()
        answer = StepAnswer(
            step_id=request.step_id,
            outcome=outcome,
            occupancy=self._cache.occupancy(),
            queue_ns=queue_ns,
            prepare_ns=prepare_ns or time.perf_counter_ns() - started,
            results=results,
            provenance_handle=handle,
        )
        self._last_step_id, self._last_answer = request.step_id, answer
        return answer

    def _record_provenance(self, request: StepRequest, tables: Int32, results: StepResults) -> int:
        """Record who wrote what, and return the handle of the step where it was asked for."""
        serial = self._cache.provenance.record(
            request.step_id,
            request.sequence_ids,
            request.start_positions,
            request.num_tokens,
            tables,
            len(request.token_ids),
            len(request.wanted),
            results.paths,
        )
        return step_handle(serial) if request.record_provenance else 0

    def provenance(
        self, sequence_id: int, generation: int, *, include_digests: bool = False
    ) -> ProvenanceReport:
        """Return who wrote an open sequence's positions; raises RecordNotKeptError."""
        known = self._sequences.get(sequence_id)
        if known is None or known.generation != generation:
            raise RecordNotKeptError(
                "[provenance] the sequence must be open, "
                f"got sequence {sequence_id}, generation {generation}"
            )
        return self._reports.of_sequence(sequence_id, known.num_computed_tokens, include_digests)

    def provenance_of(self, handle: int, *, include_digests: bool = False) -> ProvenanceReport:
        """Return what a step or an opening gave a handle for; raises RecordNotKeptError."""
        number, is_opening = divmod(handle, 2)
        if not is_opening:
            return self._reports.of_step(number)
        known = self._sequences.get(number)
        if known is None:
            raise RecordNotKeptError(
                f"[provenance] the handle must be of an open sequence, got {handle}"
            )
        return self._reports.of_sequence(number, known.num_cached_tokens, include_digests)

    def fetch_logits(
        self, ticket: int, step_id: int, wanted_indexes: Int32, max_bytes: int
    ) -> bytes:
        """Return full rows of the last step, fp32 bytes; raises LogitsNotKeptError."""
        self._check_ticket(ticket)
        return self._runner.logits(step_id, wanted_indexes, max_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError when sequences and cache disagree."""
        self._cache.check_integrity()
        if self._cache.num_sequences != len(self._sequences):
            raise AssertionError("[session] the cache and the session hold different sequences")

    def _check_ticket(self, ticket: int) -> None:
        if ticket != self._ticket:
            raise SessionFencedError("[session] another session has taken over, got the old one")

    def _check_model(self, model_id: str) -> None:
        if model_id not in ("", self._model_id):
            raise ModelNotFoundError(
                f"[session] model_id must be {self._model_id}, got {model_id}",
                {"model_id": model_id},
            )

    def _rows(self, request: StepRequest) -> list[SequenceState]:
        """Return the sequences of the rows; raises when one is not open or leaves a gap."""
        sequences = []
        for sequence_id, generation, start in zip(
            request.sequence_ids.tolist(),
            request.generations.tolist(),
            request.start_positions.tolist(),
            strict=True,
        ):
            known = self._sequences.get(sequence_id)
            if known is None or known.generation != generation:
                got = "a closed one" if known is None else f"generation {known.generation}"
                raise SequenceNotOpenError(
                    f"[step] sequence {sequence_id}, generation {generation}, must be open, "
                    f"got {got}"
                )
            # A row may go back behind computed positions (a verified draft that was refused), but
            # not into blocks that others may hold.
            if not known.num_fixed_tokens <= start <= known.num_computed_tokens:
                raise InvalidStepError(
                    "row_start_positions",
                    f"of sequence {sequence_id} must be in {known.num_fixed_tokens}.."
                    f"{known.num_computed_tokens}",
                    start,
                )
            sequences.append(known)
        return sequences

    def _resolve_tokens(self, request: StepRequest) -> tuple[Int32, list[int]]:
        """Return (T,) ids with STEP_OUTPUT rows filled in, and rows whose source is not finite."""
        if _STEP_OUTPUT not in request.sources.tobytes():
            return request.token_ids, []
        outputs = np.flatnonzero(request.sources == _STEP_OUTPUT)
        token_ids = request.token_ids.copy()
        starts = np.cumsum(request.num_tokens) - request.num_tokens
        poisoned: list[int] = []
        for row in outputs.tolist():
            step_id, index = int(request.source_steps[row]), int(request.source_wanted[row])
            token = self._runner.chosen(step_id, index)
            if token is None:
                raise InvalidStepError(
                    "row_source_steps",
                    "must name a token that the last computed step chose",
                    f"step {step_id}, wanted position {index}",
                )
            if token < 0:
                poisoned.append(row)
            token_ids[starts[row]] = max(token, 0)
        return token_ids, poisoned

    def _record(
        self, rows: list[SequenceState], ends: list[int], results: StepResults, poisoned: list[int]
    ) -> StepResults:
        """Move the sequences on; rows on top of non-finite state stay non-finite."""
        tainted = bool(results.non_finite_details or poisoned)
        for sequence, end in zip(rows, ends, strict=True):
            sequence.num_computed_tokens = end
            tainted = tainted or sequence.non_finite_detail != ""
        if not tainted:
            return results
        details = iter(results.non_finite_details)
        found = [
            next(details) if outcome == RowOutcome.NON_FINITE else ""
            for outcome in results.row_outcomes
        ]
        for row, sequence in enumerate(rows):
            if row in poisoned:
                found[row] = found[row] or "the step that chose this row's token"
            sequence.non_finite_detail = sequence.non_finite_detail or found[row]
            found[row] = sequence.non_finite_detail
        return results.with_details(found)

    def _share(
        self,
        request: StepRequest,
        rows: list[SequenceState],
        ends: list[int],
        token_ids: Int32,
    ) -> None:
        """Tell the cache which tokens each row has written, so that full blocks can be shared."""
        raw = token_ids.astype("<i4", copy=False).tobytes()
        written = self._cache.written
        stop = 0
        for sequence_id, sequence, start, end, confirmed in zip(
            request.sequence_ids.tolist(),
            rows,
            request.start_positions.tolist(),
            ends,
            confirmed_ends(request, ends),
            strict=True,
        ):
            first, stop = stop, stop + _TOKEN_BYTES * (end - start)
            if sequence.non_finite_detail:
                self._cache.stop_sharing(sequence_id)
            else:
                sequence.num_fixed_tokens = written(sequence_id, start, raw[first:stop], confirmed)
