"""The asynchronous shell around the core: plans, steps, samples and fans out, for ever.

Order within a step, pinned by a test: the next step is WRITTEN to the executor before the
tokens of the last one are fanned out, so text work and stream wake-ups happen while the
executor computes. Only where somebody is to be admitted is the executor asked before that what
it has cached of them.

Requests come and go by `LiveRequests`, at any `await` of the loop.
"""

import asyncio
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scheduler_service import logs
from scheduler_service.core import (
    Limits,
    TokenRowBatch,
    apply,
    capacity_refused,
    next_deadline,
    opened,
    openings,
    plan,
    record_kv_counts,
    record_step_seconds,
)
from scheduler_service.draft_metrics import count_drafts
from scheduler_service.executor_client import ExecutorSession
from scheduler_service.fan_out import Totals
from scheduler_service.live_requests import LiveRequests
from scheduler_service.metrics import ModelMetrics
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.sampling import WantedStatistics
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.speculation import Speculator
from scheduler_service.step_counts import OnStep, StepCounter
from scheduler_service.step_sampler import SampledStep, StepSampler
from scheduler_service.wire import executor as wire
from scheduler_service.wire.capabilities import Model

Clock = Callable[[], float]

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
        on_step: OnStep | None = None,
        slow_readers: SlowReaders | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Schedule requests of `model` within `limits`; `clock` gives monotonic seconds.

        `on_step` is called with each computed step while the next one runs: its rows, its
        times, and the executor's own account of its seconds. `slow_readers` pauses requests
        that get too far ahead of their clients; None pauses nobody.
        """
        self._wake = asyncio.Event()
        self.requests = LiveRequests(
            limits, model.model_id, metrics, totals, clock, wake=self._wake.set,
            before_events=lambda: self._counter.count(), slow_readers=slow_readers,
        )  # fmt: skip
        self.state = self.requests.state
        self.fan_out = self.requests.fan_out
        self.tracer = self.requests.tracer
        self._counter = StepCounter(
            metrics, totals, self.fan_out, lambda: self.state.pace.mixed, on_step
        )
        # Drafts tokens for the next step; may be exchanged between steps.
        self.speculator = speculator
        # True once a step of the present session was answered.
        self.has_progressed = False
        self._model = model
        self._sampler = sampler
        self._metrics = metrics
        self._totals = totals
        self._clock = clock

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
                self.requests.expire(started)
                opening_seconds = await self._open(session, started)
                batch = self._plan(started)
            if batch is not None:
                await self._step(session, batch, started, opening_seconds)
            elif self.fan_out.has_events:
                self.requests.dispatch()
            else:
                self._counter.count()
                self.requests.update_gauges()
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
        self.requests.dispatch()
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
        self._counter.put(batch if reply.answer else None, times, reply.executor_seconds)

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
