"""The asynchronous shell around the core: plans, steps, samples and fans out, for ever.

Order within a step, pinned by a test: the next step is WRITTEN to the executor before the
tokens of the last one are fanned out, so text work and stream wake-ups happen while the
executor computes. Only where somebody is to be admitted is the executor asked before that what
it has cached of them. Where it can be, one step more is sent before the answer to the one that
runs (`core.ahead`), so that the executor never waits for this process.

Requests come and go by `LiveRequests`, at any `await` of the loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_service import logs
from scheduler_service.core import (
    Limits,
    TokenRowBatch,
    apply,
    capacity_refused,
    may_plan_ahead,
    next_deadline,
    opened,
    openings,
    plan,
    plan_ahead,
    record_kv_counts,
    record_step_seconds,
    source_refused,
)
from scheduler_service.draft_exchange import ask_for_drafts
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


@dataclass(slots=True, eq=False)
class _SentStep:
    """A step without an answer."""

    batch: TokenRowBatch
    questions: list[WantedStatistics]
    written: float = 0.0  # monotonic seconds


class _TurnClock:
    """Sums up the phases of one turn of the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.started = self._last = clock()
        self.opening_seconds = 0.0
        self.fanned_out = 0.0
        self._planning = self._writing = 0.0

    def planned(self) -> None:
        """Note that a message is ready."""
        now = self._clock()
        self._planning, self._last = self._planning + now - self._last, now

    def written(self) -> float:
        """Note that it was sent; return the time."""
        now = self._clock()
        self._writing, self._last = self._writing + now - self._last, now
        return now

    def times(self, answered: float) -> PhaseTimes:
        """Return the borders of the phases; where two steps were sent, of both together."""
        planned = self.started + self._planning
        written = planned + self._writing
        return PhaseTimes(
            self.started, planned, self.opening_seconds, written, self.fanned_out, answered,
            self._clock(),
        )  # fmt: skip


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
        *,
        may_look_ahead: bool = False,
    ) -> None:
        """Schedule requests of `model` within `limits`; `clock` gives monotonic seconds.

        `on_step` is called with each computed step while the next one runs: its rows, its
        times, and the executor's own account of its seconds. `slow_readers` pauses requests
        that get too far ahead of their clients; None pauses nobody. With `may_look_ahead` a
        step may be sent before the answer to the one ahead of it.
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
        # Whether the present executor takes a step before it has answered the last.
        self.may_look_ahead = may_look_ahead
        # True once a step of the present session was answered.
        self.has_progressed = False
        self._model = model
        self._sampler = sampler
        self._metrics = metrics
        self._totals = totals
        self._clock = clock
        # Steps in flight in the core, in order.
        self._sent: deque[_SentStep] = deque()
        self._last_answered = -math.inf

    async def run(self, session: ExecutorSession) -> None:
        """Run steps until the session is lost (SessionLostError, SessionRefusedError, WireError).

        Steps that are in flight in the core are repeated first.
        """
        self.has_progressed = False
        try:
            await self._repeat(session)
            while True:
                await self._turn(session)
        finally:
            self.tracer.lose()

    async def _repeat(self, session: ExecutorSession) -> None:
        in_flight = (self.state.in_flight, self.state.ahead)
        self._sent = deque(
            step for step in self._sent if any(step.batch is each for each in in_flight)
        )
        for step in self._sent:
            await session.write(wire.step(step.batch, step.questions))

    async def _turn(self, session: ExecutorSession) -> None:
        """Send the next step, give out what the last one gave, and take the next answer."""
        clock = _TurnClock(self._clock)
        self.requests.expire(clock.started)
        if not self._sent:
            self._wake.clear()
            await self._open(session, clock)
            clock.opening_seconds += await self._ask_for_drafts(session)
            batch = self._plan(clock.started)
            if batch is None:
                await self._rest(session)
                return
            await self._send(session, batch, clock)
        await self._send_ahead(session, clock)
        self.requests.dispatch()
        clock.fanned_out = self._clock()
        await self._take_answer(session, clock)

    async def _rest(self, session: ExecutorSession) -> None:
        """Do what is left when there is nothing to compute, and wait for more."""
        if self.fan_out.has_events:
            self.requests.dispatch()
            return
        self._counter.count()
        self.requests.update_gauges()
        if self.speculator is not None:
            self.speculator.forget_ended(self.state)
        times = (next_deadline(self.state), self.fan_out.slow_readers.next_time())
        due = min((each for each in times if each is not None), default=None)
        timeout = None if due is None else max(0.0, due - self._clock())
        await session.idle(self._wake, timeout)

    async def _open(self, session: ExecutorSession, clock: _TurnClock) -> None:
        """Announce whoever is about to be admitted."""
        for _ in range(_MAX_OPENING_ROUNDS):
            found = openings(self.state, clock.started)
            if not found:
                break
            started = self._clock()
            await session.write(wire.open_sequences(found))
            answers, counts = wire.read_opened(await session.read(), found)
            clock.opening_seconds += self._clock() - started
            record_kv_counts(self.state, counts)
            opened(self.state, answers)

    async def _ask_for_drafts(self, session: ExecutorSession) -> float:
        """Let the draft model work where it is to; return the seconds that it took."""
        if self.speculator is None:
            return 0.0
        return await ask_for_drafts(
            session, self.speculator, self.state, self._model.vocab_size,
            self.requests.dispatch, self._clock, goes_ahead=self._goes_ahead(),
        )  # fmt: skip

    def _plan(self, now: float) -> TokenRowBatch | None:
        drafts = {}
        if self.speculator is not None:
            drafts = self.speculator.draft(self.state, goes_ahead=self._goes_ahead())
        batch = plan(self.state, now, drafts)
        if batch is not None:
            self.fan_out.add(batch.events)
        return batch

    async def _send_ahead(self, session: ExecutorSession, clock: _TurnClock) -> None:
        """Send one step more than the one that runs, where that can be."""
        if len(self._sent) > 1 or not self._goes_ahead() or self._may_draft():
            return
        batch = plan_ahead(self.state, self._sampler.is_chosen_by_executor)
        if batch is not None:
            self._metrics.steps_ahead.inc()
            await self._send(session, batch, clock)

    def _goes_ahead(self) -> bool:
        """Return whether a step may be sent ahead, as far as the core can tell now."""
        return self.may_look_ahead and may_plan_ahead(
            self.state, self._sampler.is_chosen_by_executor
        )

    def _may_draft(self) -> bool:
        """Return whether drafts may be wanted: they go behind tokens that are known."""
        return (
            self.speculator is not None
            and any(request.takes_drafts for request in self.state.running.values())
            and self.speculator.may_draft(self.state)
        )

    async def _send(
        self, session: ExecutorSession, batch: TokenRowBatch, clock: _TurnClock
    ) -> None:
        logs.bind(step_id=batch.step_id)
        questions = self._sampler.questions(batch, self.fan_out.digest_ids, self.tracer.request_ids)
        step = _SentStep(batch, questions)
        self._sent.append(step)
        await self.tracer.release(batch.released_sequence_ids, session)
        message = wire.step(batch, questions)
        clock.planned()
        await session.write(message)
        step.written = clock.written()

    async def _take_answer(self, session: ExecutorSession, clock: _TurnClock) -> None:
        """Read the answer to the step that was sent first, and fold it back."""
        step = self._sent[0]
        batch, questions = step.batch, step.questions
        logs.bind(step_id=batch.step_id)
        response = await session.read()
        is_traced = self.tracer.wants(batch)
        reply = wire.read_step(
            response, batch, questions, self._model.vocab_size, wants_paths=is_traced
        )
        answered = self._clock()
        # It may have waited for the step ahead of it.
        began, self._last_answered = max(step.written, self._last_answered), answered
        record_kv_counts(self.state, reply.kv_counts)
        num_vain_rows = self.state.num_vain_rows
        if reply.answer is None:
            if reply.has_source:
                self.fan_out.add(capacity_refused(self.state, batch))
            else:
                source_refused(self.state, batch)
        else:
            sampled = await self._sample(session, batch, questions, reply.answer)
            live = {row.request_id for row in batch.rows if self.state.request_of(row) is not None}
            record_step_seconds(self.state, batch, reply.executor_seconds)
            events = apply(self.state, batch, sampled.rows)
            if is_traced:
                self.tracer.record(
                    batch, reply.answer, events,
                    written=began, answered=answered, executor_seconds=reply.executor_seconds,
                )  # fmt: skip
            self.fan_out.add(events, sampled.digests)
            num_prompt_tokens = sum(
                len(row.token_ids) for row in batch.rows if row.num_known_tokens > 1
            )
            self.state.service_rate.record_step(
                num_prompt_tokens, batch.num_tokens, answered - began
            )
            if self.speculator is not None:
                seconds = self._clock() - clock.started - clock.opening_seconds
                # Who has ended meanwhile was told its counts, and nothing is kept of it.
                rows = {each: came for each, came in sampled.rows.items() if each in live}
                counts = self.speculator.learn(batch, rows, seconds)
                count_drafts(counts, self._totals, self._metrics)
        self._sent.popleft()
        if self.state.num_vain_rows != num_vain_rows:
            self._metrics.vain_rows.inc(self.state.num_vain_rows - num_vain_rows)
        self.has_progressed = True
        self._counter.put(
            batch if reply.answer else None, clock.times(answered), reply.executor_seconds
        )

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
