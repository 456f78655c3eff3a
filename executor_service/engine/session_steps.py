"""The steps of a session: their ids, the answer that is kept, and computing one.

Runs on the engine thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from executor_service.engine.step_check import StepChecker
from executor_service.engine.step_records import record_provenance, share, taint
from executor_service.engine.step_request import Outcome, Source, StepAnswer
from executor_service.errors import InvalidStepError, StepOutOfOrderError

if TYPE_CHECKING:
    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.open_sequences import OpenSequences
    from executor_service.engine.step_request import Int32, Limits, StepRequest, StepResults
    from executor_service.kv_cache.manager import KvCacheManager

_STEP_OUTPUT = int(Source.STEP_OUTPUT)


class SessionSteps:
    """Computes steps in the order of their ids; the last one is answered again from memory."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: KvCacheManager,
        sequences: OpenSequences,
        limits: Limits,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._sequences = sequences
        self._checker = StepChecker(limits)
        self._last_step_id = 0
        self._last_answer: StepAnswer | None = None

    def forget(self) -> None:
        """Begin again with step 1."""
        self._last_step_id = 0
        self._last_answer = None
        self._runner.forget()

    def kept(self, request: StepRequest) -> StepAnswer | None:
        """Return the answer to a repeated step; raises StepOutOfOrderError for one out of turn."""
        if request.step_id == self._last_step_id and self._last_answer is not None:
            return self._last_answer
        if request.step_id != self._last_step_id + 1:
            raise StepOutOfOrderError(
                f"[step] step_id must be {self._last_step_id + 1}, got {request.step_id}"
            )
        return None

    def compute(self, request: StepRequest, queue_ns: int, started: int) -> StepAnswer:
        """Compute the step whose turn it is; one that is refused with an error changes nothing.

        `started` is when it reached the engine thread, in nanoseconds.
        """
        self._checker.check(request)
        rows = self._sequences.of_rows(request)
        token_ids, poisoned = self._resolve_tokens(request)
        if len(request.released):
            self._sequences.release(request.released.tolist())
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
                for sequence, end in zip(rows, ends, strict=True):
                    sequence.num_computed_tokens = end
                results = taint(rows, results, poisoned)
                handle = record_provenance(self._cache, request, tables, results)
                if self._cache.index is not None:
                    share(self._cache, request, rows, ends, token_ids)
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
