"""The asynchronous shell around the core: plans, steps, samples and fans out, for ever.

Order within a step, pinned by a test: the next step is WRITTEN to the executor before the
tokens of the last one are fanned out, so text work and stream wake-ups happen while the
executor computes. Only where somebody is to be admitted is the executor asked before that what
it has cached of them.

The core is synchronous and everything runs on one event loop, so `submit` and `cancel` may be
called by other tasks at any `await` of the loop; the core allows for that.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from scheduler_service import logs
from scheduler_service.core import (
    CoreError,
    Limits,
    Request,
    RequestId,
    SchedulerState,
    TokenRow,
    TokenRowBatch,
    apply,
    cancel,
    capacity_refused,
    executor_restarted,
    expire,
    next_deadline,
    opened,
    openings,
    plan,
    record_kv_counts,
    record_step_seconds,
    submit,
)
from scheduler_service.draft_metrics import count_drafts
from scheduler_service.errors import ServiceError, SlowReaderError, from_core
from scheduler_service.executor_client import ExecutorSession
from scheduler_service.fan_out import FanOut, Totals
from scheduler_service.metrics import (
    ModelMetrics,
    Outcome,
    PromptSource,
    RowPhase,
)
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.queue_metrics import refusal_reason, update_gauges
from scheduler_service.sampling import WantedStatistics
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.speculation import Speculator
from scheduler_service.step_sampler import SampledStep, StepSampler
from scheduler_service.streams import TokenStream
from scheduler_service.tracing.tracer import Tracer
from scheduler_service.wire import executor as wire
from scheduler_service.wire.capabilities import Model

Clock = Callable[[], float]

# A deadline that is this near has passed: the two processes' clocks and timers are not one.
_DEADLINE_SLACK_SECONDS = 0.02
# Most round trips for openings before a step: what is found cached makes room for more.
_MAX_OPENING_ROUNDS = 4
# Most logits of one answer: 32 MiB, half of what a message may have.
_MAX_FETCHED_LOGITS = 8 << 20


class StepLoop:
    """Runs the steps of one model over whatever session it is given."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        sampler: StepSampler,
        metrics: ModelMetrics,
        totals: Totals,
        clock: Clock = time.monotonic,
        on_step: Callable[[TokenRowBatch, PhaseTimes, float], None] | None = None,
        slow_readers: SlowReaders | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Schedule requests of `model` within `limits`; `clock` gives monotonic seconds.

        `on_step` is called with each computed step while the next one runs: its rows, its
        times, and the executor's own account of its seconds. `slow_readers` pauses requests
        that get too far ahead of their clients; None pauses nobody.
        """
        self.state = SchedulerState(limits, model=model.model_id)
        self.tracer = Tracer(metrics.trace_bytes.inc)
        if slow_readers is None:
            slow_readers = SlowReaders(sys.maxsize, math.inf)
        self.fan_out = FanOut(totals, slow_readers, self.tracer.end)
        # Drafts tokens for the next step; may be exchanged between steps.
        self.speculator = speculator
        # True once a step of the present session was answered.
        self.has_progressed = False
        self._model = model
        self._sampler = sampler
        self._metrics = metrics
        self._totals = totals
        self._clock = clock
        self._on_step = on_step
        self._wake = asyncio.Event()
        # Of the last answered step until it is counted: rows, unless they were refused; times;
        # the executor's seconds.
        self._uncounted: tuple[TokenRowBatch | None, PhaseTimes, float] | None = None

    def submit(self, *streams: TokenStream) -> None:
        """Queue the requests of a call; raises ServiceError when the core refuses them."""
        if any(stream.request.request_id in self.fan_out.streams for stream in streams):
            # Whoever had this id may have ended without having been told, and events know
            # requests by their ids alone.
            self._dispatch()
        try:
            submit(self.state, *(stream.request for stream in streams))
        except CoreError as error:
            self._metrics.requests[Outcome.REJECTED].inc()
            self._metrics.refusals[refusal_reason(error)].inc()
            raise from_core(error) from error
        for stream in streams:
            self.fan_out.open(stream)
            if stream.recorder is not None:
                self.tracer.open(stream.recorder)
            stream.on_drained = partial(self._drained, stream.request.request_id)
        self._update_gauges()
        self._wake.set()

    def cancel(self, request_id: RequestId) -> bool:
        """End a request; return whether it was live."""
        request = self.state.requests.get(request_id)
        if request is None:
            return False
        deadline, now = request.deadline, self._clock()
        if deadline is not None and now >= deadline - _DEADLINE_SLACK_SECONDS:
            self.fan_out.add(expire(self.state, deadline))
        else:
            self.fan_out.add(cancel(self.state, request_id))
        self._dispatch()
        self._wake.set()
        return True

    def cancel_group(self, group_id: RequestId) -> bool:
        """End all samples of a call; return whether one was live."""
        requests = self.state.requests.values()
        samples = [each.request_id for each in requests if each.group_id == group_id]
        for request_id in samples:
            self.cancel(request_id)
        return bool(samples)

    def give_up(self, make_error: Callable[[], ServiceError]) -> None:
        """End every live request with an error."""
        self._dispatch()
        for request_id in list(self.state.requests):
            self.fan_out.streams[request_id].fail(make_error())
            self.fan_out.add(cancel(self.state, request_id))
        self._dispatch()

    def expire(self) -> None:
        """End the requests whose time has passed; for the time without a session."""
        self._expire(self._clock())
        self._dispatch()

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has passed or whose reader was away for too long."""
        self.fan_out.add(expire(self.state, now))
        slow_readers = self.fan_out.slow_readers
        for request_id in slow_readers.overdue(now):
            self.fan_out.streams[request_id].fail(SlowReaderError(slow_readers.limit_seconds))
            self.fan_out.add(cancel(self.state, request_id))

    def _drained(self, request_id: RequestId) -> None:
        if self.fan_out.slow_readers.drained(self.state, request_id):
            self._wake.set()

    def restart(self, limits: Limits) -> None:
        """Prepare for an executor that has lost all cached state and has these limits."""
        self._dispatch()
        self.fan_out.add(executor_restarted(self.state, limits))
        self._dispatch()

    def _dispatch(self) -> None:
        self._count_step()
        self.fan_out.dispatch(self.state, self._metrics, self._clock())
        self._update_gauges()

    def _update_gauges(self) -> None:
        update_gauges(self._metrics, self.state, len(self.fan_out.slow_readers))

    async def run(self, session: ExecutorSession) -> None:
        """Run steps until the session is lost (SessionLostError, SessionRefusedError, WireError).

        A step that is in flight in the core is repeated first.
        """
        self.has_progressed = False
        try:
            await self._run(session)
        finally:
            self.tracer.lose()

    async def _run(self, session: ExecutorSession) -> None:
        while True:
            started = self._clock()
            batch, opening_seconds = self.state.in_flight, 0.0
            if batch is None:
                self._wake.clear()
                self._expire(started)
                opening_seconds = await self._open(session, started)
                batch = self._plan(started)
            if batch is not None:
                await self._step(session, batch, started, opening_seconds)
            elif self.fan_out.has_events:
                self._dispatch()
            else:
                self._count_step()
                self._update_gauges()
                if self.speculator is not None:
                    self.speculator.forget_ended(self.state)
                times = (next_deadline(self.state), self.fan_out.slow_readers.next_time())
                due = min((each for each in times if each is not None), default=None)
                timeout = None if due is None else max(0.0, due - self._clock())
                await session.idle(self._wake, timeout)

    async def _open(self, session: ExecutorSession, now: float) -> float:
        """Announce whoever is about to be admitted; return the seconds that it took."""
        seconds = 0.0
        for _ in range(_MAX_OPENING_ROUNDS):
            found = openings(self.state, now)
            if not found:
                break
            started = self._clock()
            await session.write(wire.open_sequences(found))
            answers, counts = wire.read_opened(await session.read(), found)
            seconds += self._clock() - started
            record_kv_counts(self.state, counts)
            opened(self.state, answers)
        return seconds

    def _plan(self, now: float) -> TokenRowBatch | None:
        drafts = {}
        if self.speculator is not None:
            drafts = self.speculator.draft(self.state)
        batch = plan(self.state, now, drafts)
        if batch is not None:
            self.fan_out.add(batch.events)
        return batch

    async def _step(
        self,
        session: ExecutorSession,
        batch: TokenRowBatch,
        started: float,
        opening_seconds: float,
    ) -> None:
        logs.bind(step_id=batch.step_id)
        questions = self._sampler.questions(batch, self.fan_out.digest_ids, self.tracer.request_ids)
        await self.tracer.release(batch.released_sequence_ids, session)
        message = wire.step(batch, questions)
        planned = self._clock()
        await session.write(message)
        written = self._clock()
        self._dispatch()
        fanned_out = self._clock()
        response = await session.read()
        is_traced = self.tracer.wants(batch)
        reply = wire.read_step(
            response, batch, questions, self._model.vocab_size, wants_paths=is_traced
        )
        answered = self._clock()
        record_kv_counts(self.state, reply.kv_counts)
        if reply.answer is None:
            self.fan_out.add(capacity_refused(self.state, batch))
        else:
            sampled = await self._sample(session, batch, questions, reply.answer)
            record_step_seconds(self.state, batch, reply.executor_seconds)
            events = apply(self.state, batch, sampled.rows)
            if is_traced:
                self.tracer.record(
                    batch, reply.answer, events,
                    written=written, answered=answered, executor_seconds=reply.executor_seconds,
                )  # fmt: skip
            self.fan_out.add(events, sampled.digests)
            num_prompt_tokens = sum(
                len(row.token_ids) for row in batch.rows if row.num_known_tokens > 1
            )
            self.state.service_rate.record_step(
                num_prompt_tokens, batch.num_tokens, answered - written
            )
            if self.speculator is not None:
                seconds = self._clock() - started - opening_seconds
                counts = self.speculator.learn(batch, sampled.rows, seconds)
                count_drafts(self.speculator.kind, counts, self._totals, self._metrics)
        self.has_progressed = True
        times = PhaseTimes(
            started, planned, opening_seconds, written, fanned_out, answered, self._clock()
        )
        self._uncounted = (batch if reply.answer else None, times, reply.executor_seconds)

    def _count_step(self) -> None:
        """Put the last step in the metrics: once the next one runs, before its events go out."""
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
                self._metrics.step_bound.set(batch.bound_seconds * self.state.pace.mixed)
            if self._on_step is not None:
                self._on_step(batch, times, executor_seconds)
        self._totals.num_steps += 1
        for phase, seconds in times.phases(executor_seconds).items():
            self._metrics.step_phase[phase].observe(seconds)
        self._metrics.step_wall.inc(times.applied - times.started)
        self._metrics.last_step.set_to_current_time()

    async def _sample(
        self,
        session: ExecutorSession,
        batch: TokenRowBatch,
        questions: list[WantedStatistics],
        answer: wire.StepAnswer,
    ) -> SampledStep:
        async def fetch_rows(indexes: list[int]) -> NDArray[np.float32]:
            vocab_size = self._model.vocab_size
            num_at_once = max(1, _MAX_FETCHED_LOGITS // vocab_size)
            parts = []
            for start in range(0, len(indexes), num_at_once):
                part = indexes[start : start + num_at_once]
                await session.write(wire.fetch_logits(batch.step_id, part))
                answer = await session.read()
                parts.append(wire.read_logits(answer, batch.step_id, len(part), vocab_size))
            return np.concatenate(parts)

        return await self._sampler.sample(batch, questions, answer, fetch_rows)

    def _count_rows(self, batch: TokenRowBatch) -> None:
        num_rows = {RowPhase.PREFILL: 0, RowPhase.DECODE: 0}
        for row in batch.rows:
            stream = self.fan_out.streams.get(row.request_id)
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
