"""The steps of a session: their ids, the answers that are kept, beginning and finishing one.

Runs on the engine thread. A step may be begun while the one before it is computed: its rows then
name that step for the tokens that are not known yet. What is decided when a step begins counts
for the next at once: releases, growth, and the positions that its rows will have computed. What
was computed is written down when it finishes, in order.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from executor_service.engine.step_check import StepChecker
from executor_service.engine.step_in_flight import StepInFlight
from executor_service.engine.step_records import record_provenance, share, taint
from executor_service.engine.step_request import MAX_STEPS_IN_FLIGHT, Outcome, StepAnswer
from executor_service.engine.step_tokens import (
    ChosenTokens,
    SourceNotComputedError,
    backend_sources,
    check_sources,
    has_sources,
    with_outputs,
)
from executor_service.errors import StepOutOfOrderError

if TYPE_CHECKING:
    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.open_sequences import OpenSequences
    from executor_service.engine.step_request import Int32, Limits, StepRequest
    from executor_service.kv_cache.manager import KvCacheManager


class SessionSteps:
    """Computes steps in the order of their ids; the last ones are answered again from memory."""

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
        self._last_step_id = 0  # begun
        # The last computed step, whose tokens the next may take.
        self._chosen: ChosenTokens | None = None
        self._begun: deque[StepInFlight] = deque()
        self._answers: deque[StepAnswer] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._finished_ns = 0

    def forget(self) -> None:
        """Begin again with step 1; no step is in flight."""
        self._last_step_id = 0
        self._begun.clear()
        self._answers.clear()
        self._chosen = None
        self._runner.forget()

    def begin(self, request: StepRequest, arrived_ns: int) -> StepInFlight:
        """Begin the step whose turn it is, or repeat one; refused with an error it changes nothing.

        `arrived_ns` is `time.perf_counter_ns` at its arrival. A step that gives sequences back
        waits with that until the one before it is done, and so does one behind it. Raises
        StepOutOfOrderError.
        """
        for answer in self._answers:
            if answer.step_id == request.step_id:
                return StepInFlight(request, self, answer=answer)
        if request.step_id != self._last_step_id + 1:
            raise StepOutOfOrderError(
                f"[step] step_id must be {self._last_step_id + 1}, got {request.step_id}"
            )
        self._checker.check(request)
        step = StepInFlight(request, self, arrived_ns=arrived_ns)
        if self._begun and (len(request.released) or self._begun[-1].is_postponed):
            step.is_postponed = True
        else:
            self._begin(step)
        self._begun.append(step)
        self._last_step_id = request.step_id
        return step

    def _begin(self, step: StepInFlight) -> None:
        """Release, grow and submit."""
        started = time.perf_counter_ns()
        request = step.request
        # Where the step ahead of it is still computed, it costs no time of its own yet.
        is_next = not self._begun or self._begun[0] is step
        if is_next:
            step.queue_ns = max(0, started - max(step.arrived_ns, self._finished_ns))
        try:
            sources = self._sources(step)
        except SourceNotComputedError:
            self._sequences.release(request.released.tolist())
            self._without_results(step, Outcome.SOURCE_NOT_COMPUTED, started)
            return
        rows = self._sequences.of_rows(request)
        if len(request.released):
            self._sequences.release(request.released.tolist())
        sequence_ids = request.sequence_ids.tolist()
        ends = (request.start_positions + request.num_tokens).tolist()
        if not self._cache.grow(dict(zip(sequence_ids, ends, strict=True))):
            self._without_results(step, Outcome.NO_CAPACITY, started)
            return
        if not rows:
            self._without_results(step, Outcome.COMPUTED, started)
            return
        step.tables = self._cache.block_tables(sequence_ids)
        if is_next:
            step.prepare_ns = time.perf_counter_ns() - started
        step.pending = self._runner.submit(request, step.token_ids, step.tables, sources)
        step.take(rows, ends)

    def _sources(self, step: StepInFlight) -> Int32 | None:
        """Fill in the tokens that are known already; return what the backend fills in, or None."""
        request = step.request
        if not has_sources(request):
            return None
        # One that was postponed begins when it is the first.
        before = self._begun[-1] if self._begun and self._begun[0] is not step else None
        refused = {
            answer.step_id for answer in self._answers if answer.outcome is not Outcome.COMPUTED
        }
        if before is not None and before.answer is not None:
            refused.add(before.request.step_id)
        elif before is not None:
            check_sources(request, before.request)
            step.has_unknown_tokens = True
            return backend_sources(request)
        step.token_ids, step.poisoned = with_outputs(request, self._chosen_token, refused)
        return None

    def _chosen_token(self, step_id: int, wanted_index: int) -> int | None:
        return None if self._chosen is None else self._chosen.of(step_id, wanted_index)

    def _without_results(self, step: StepInFlight, outcome: Outcome, started: int) -> None:
        step.answer = StepAnswer(
            step_id=step.request.step_id,
            outcome=outcome,
            occupancy=self._cache.occupancy(),
            queue_ns=step.queue_ns,
            prepare_ns=time.perf_counter_ns() - started,
            since_ns=max(step.arrived_ns, self._finished_ns),
        )

    def finish(self, step: StepInFlight) -> StepAnswer:
        """Wait for the oldest step in flight and return its answer.

        Where it fails, it and the one after it are as if they had not begun, but for what they
        gave back.
        """
        if step.answer is not None and step not in self._begun:
            return step.answer
        if not self._begun or self._begun[0] is not step:
            raise StepOutOfOrderError(
                f"[step] the steps before {step.request.step_id} must be computed, got a failed one"
            )
        try:
            if step.is_postponed:
                step.is_postponed = False
                self._begin(step)
            answer = step.answer or self._computed(step)
        except BaseException:
            self._take_back()
            raise
        self._begun.popleft()
        self._answers.append(answer)
        self._finished_ns = time.perf_counter_ns()
        if answer.results is None:
            self._runner.forget_logits()
        return answer

    def _computed(self, step: StepInFlight) -> StepAnswer:
        request, pending = step.request, step.pending
        if pending is None:
            raise AssertionError(f"[step] step {request.step_id} must be submitted, got another")
        if step.has_unknown_tokens:
            step.token_ids, step.poisoned = with_outputs(request, self._chosen_token)
        results = self._runner.finish(request, pending)
        results = taint(step.rows, results, step.poisoned)
        self._chosen = ChosenTokens(request, results)
        handle = record_provenance(self._cache, request, step.tables, results)
        if self._cache.index is not None:
            share(self._cache, request, step.rows, step.ends, step.token_ids)
            self._cache.note_step(len(step.token_ids), results.forward_ns * 1e-9)
        return StepAnswer(
            step_id=request.step_id,
            outcome=Outcome.COMPUTED,
            occupancy=self._cache.occupancy(),
            queue_ns=step.queue_ns,
            prepare_ns=step.prepare_ns,
            results=results,
            provenance_handle=handle,
            since_ns=max(step.arrived_ns, self._finished_ns),
        )

    def _take_back(self) -> None:
        """Undo what the steps in flight have begun, the last one first."""
        while self._begun:
            step = self._begun.pop()
            self._last_step_id = step.request.step_id - 1
            step.give_back()
            if step.pending is not None and self._begun:
                # The backend must not keep it; the first one is what has failed.
                with contextlib.suppress(Exception):
                    step.pending.finish()
