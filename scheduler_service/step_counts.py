"""Puts computed steps in the metrics, at a time when nobody waits for it."""

import math
import time
from collections.abc import Callable

from scheduler_service.core import Request, TokenRow, TokenRowBatch, TokenSourceKind
from scheduler_service.fan_out import FanOut, Totals
from scheduler_service.metrics import ModelMetrics, PromptSource, RowPhase
from scheduler_service.phase_times import PhaseTimes

OnStep = Callable[[TokenRowBatch, PhaseTimes, float], None]


class StepCounter:
    """Keeps the last answered step until the next one runs, and then counts it."""

    def __init__(
        self,
        metrics: ModelMetrics,
        totals: Totals,
        fan_out: FanOut,
        pace: Callable[[], float],
        on_step: OnStep | None = None,
    ) -> None:
        """Count rows of `fan_out`'s streams; `pace` is that of mixed steps against the curve.

        `on_step` is called with each computed step: its rows, its times, and the executor's own
        account of its seconds.
        """
        self._metrics = metrics
        self._totals = totals
        self._fan_out = fan_out
        self._pace = pace
        self._on_step = on_step
        self._uncounted: tuple[TokenRowBatch | None, PhaseTimes, float] | None = None

    def put(self, batch: TokenRowBatch | None, times: PhaseTimes, executor_seconds: float) -> None:
        """Keep an answered step; its rows are None where they were refused."""
        self._uncounted = (batch, times, executor_seconds)

    def count(self) -> None:
        """Count what was put: once the next step runs, before its events go out."""
        if self._uncounted is None:
            return
        batch, times, executor_seconds = self._uncounted
        self._uncounted = None
        if batch is not None:
            self._count_rows(batch)
            if batch.predicted_seconds:
                self._metrics.step_predicted.inc(batch.predicted_seconds)
                self._metrics.step_measured.inc(executor_seconds)
            if batch.bound_seconds < math.inf:
                self._metrics.step_bound.set(batch.bound_seconds * self._pace())
            if self._on_step is not None:
                self._on_step(batch, times, executor_seconds)
        self._totals.num_steps += 1
        for phase, seconds in times.phases(executor_seconds).items():
            self._metrics.step_phase[phase].observe(seconds)
        self._metrics.step_wall.inc(times.applied - times.started)
        self._metrics.last_step.set(time.time())

    def _count_rows(self, batch: TokenRowBatch) -> None:
        num_rows = {RowPhase.PREFILL: 0, RowPhase.DECODE: 0}
        for row in batch.rows:
            if row.source.kind is TokenSourceKind.STEP_OUTPUT:
                # It goes on from a token that was drawn.
                num_rows[RowPhase.DECODE] += 1
                continue
            stream = self._fan_out.streams.get(row.request_id)
            if stream is not None and _is_prefill(row, stream.request):
                num_rows[RowPhase.PREFILL] += 1
                again = stream.request.num_preemptions > 0
                source = PromptSource.RECOMPUTED if again else PromptSource.COMPUTED
                self._metrics.prompt_tokens[source].inc(len(row.token_ids))
                if source is PromptSource.COMPUTED:
                    self._totals.num_prompt_tokens += len(row.token_ids)
            else:
                num_rows[RowPhase.DECODE] += 1
        for phase, count in num_rows.items():
            if count:
                self._metrics.step_rows[phase].observe(count)


def _is_prefill(row: TokenRow, request: Request) -> bool:
    return row.num_known_tokens > 1 or row.start_position < len(request.prompt_token_ids)
