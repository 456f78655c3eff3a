"""Whole traces of the core against a fake block pool, with everything that can go wrong in them."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

from hypothesis import event, given, settings

from scheduler_service.core import (
    DeadlineUnreachableError,
    Event,
    FinishReason,
    KvCounts,
    PreemptionReason,
    RequestAdmitted,
    RequestFinished,
    RequestId,
    RequestPreempted,
    SampledRow,
    SchedulerState,
    TokenEmitted,
    TokenRowBatch,
    apply,
    cancel,
    capacity_refused,
    executor_restarted,
    expire,
    finish_by_stop_string,
    opened,
    openings,
    pause,
    plan,
    plan_ahead,
    record_kv_counts,
    record_step_seconds,
    resume,
    source_refused,
    submit,
)
from scheduler_service.core.precedence import leader
from tests.support.core_scenarios import make_limits, make_request
from tests.support.fake_block_pool import VOCAB_SIZE, FakeBlockPool, next_token, solo_run
from tests.support.scheduler_scenarios import Arrival, Scenario, quiet, troubled

MAX_STEPS = 5000
AGING_STEPS = 4.0
PAUSE_STEPS = 7
# A trace takes some hundredths of a second, so more than the profile's usual number are affordable.
many = settings(max_examples=2 * settings().max_examples)
STOP = frozenset({3})


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A batch, what will come of it, and the counts of blocks that come with that."""

    batch: TokenRowBatch
    sampled: dict[RequestId, SampledRow] | None
    has_source: bool
    counts: KvCounts


class Trace:
    """Drives one scenario to its end and keeps what came of it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        longest = max(len(a.prompt) + a.max_tokens for a in scenario.arrivals)
        num_blocks = -(-longest // scenario.block_size) + scenario.slack
        limits = make_limits(
            tokens=scenario.tokens,
            chunk=scenario.chunk,
            seqs=scenario.seqs,
            block_size=scenario.block_size,
            blocks=num_blocks,
            aging=AGING_STEPS,
        )
        limits = dataclasses.replace(
            limits, cost_curve=scenario.curve, max_step_seconds=scenario.bound
        )
        self.state = SchedulerState(limits)
        self.pool = FakeBlockPool(scenario.block_size, max(1, num_blocks - scenario.missing_blocks))
        self.output: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.paused: dict[int, list[RequestId]] = {}
        self.seen: Counter[str] = Counter()
        self.flight: deque[_Sent] = deque()

    def run(self) -> None:
        """Run until every request has ended and everything is given back."""
        todo = sorted(enumerate(self.scenario.arrivals), key=lambda item: item[1].step)
        step = 0
        num_arrivals = len(self.scenario.arrivals)
        while todo or len(self.ends) < num_arrivals or self.state.to_release or self.flight:
            while todo and todo[0][1].step <= step:
                index, arrival = todo.pop(0)
                self._submit(index, arrival)
            self._record(expire(self.state, float(step)))
            self._pause(step)
            if step in self.scenario.restarts_between:
                self._restart()
                self.flight.clear()
            self._step(step)
            step += 1
            assert step < MAX_STEPS, "livelock"

    def _submit(self, index: int, arrival: Arrival) -> None:
        request = make_request(
            str(index),
            arrival.prompt,
            arrival.max_tokens,
            stop=STOP if arrival.stops else frozenset(),
            deadline=None if arrival.deadline is None else float(arrival.deadline),
            salt=arrival.salt,
            arrival=float(arrival.step),
            priority=arrival.priority,
            client=arrival.client,
        )
        self.output[request.request_id] = []
        try:
            submit(self.state, request)
        except DeadlineUnreachableError:
            self.seen["unreachable"] += 1
            self.ends[request.request_id] = FinishReason.DEADLINE

    def _restart(self) -> None:
        self.pool.restart()
        self._record(executor_restarted(self.state))

    def _open(self, step: int) -> None:
        """Open whoever is about to be admitted, with all that may happen meanwhile."""
        for _ in range(self.scenario.seqs):
            found = openings(self.state, float(step))
            self.state.check_invariants()
            if not found:
                break
            most = [self.scenario.hits[(step + i) % len(self.scenario.hits)] for i in range(8)]
            answers = [
                answer
                for each, limit in zip(found, most, strict=False)
                for answer in self.pool.open([each], limit)
            ]
            self._cancel(self.scenario.opening_cancels.get(step))
            if step in self.scenario.lost_openings:
                # As when a session breaks: the same are announced again.
                self.seen["lost"] += 1
                again = openings(self.state, float(step))
                answers = self.pool.open(again)
            if step in self.scenario.restarts_while_opening:
                self._restart()
            record_kv_counts(self.state, self.pool.cache.counts())
            opened(self.state, answers)
            self.seen["hits"] += any(each.num_cached_tokens for each in answers)
            self.state.check_invariants()
        self.seen["waits"] += any(each.prefix_wait for each in self.state.waiting)
        if step in self.scenario.restarts_when_opened:
            self._restart()

    def _pause(self, step: int) -> None:
        """Pause a request for some steps, as a slow reader would."""
        for name in self.paused.pop(step, ()):
            resume(self.state, name)
        index = self.scenario.pauses.get(step)
        live = list(self.state.requests.values())
        if index is not None and index < len(live):
            pause(self.state, live[index].request_id)
            self.paused.setdefault(step + PAUSE_STEPS, []).append(live[index].request_id)

    def _step(self, step: int) -> None:
        if not self.flight:
            self._open(step)
            batch = plan(self.state, float(step), self._drafts(step))
            self.state.check_invariants()
            if batch is None:
                assert all(request.is_paused for request in self.state.running.values())
                # Only a restart in between can leave nobody to admit.
                scenario = self.scenario
                restarts = scenario.restarts_while_opening | scenario.restarts_when_opened
                assert not self.state.has_work or step in restarts
                return
            self._record(batch.events)
            self._check_batch(batch)
            self._send(batch, refuse=step in self.scenario.refusals)
        if self.scenario.looks_ahead:
            self._send_ahead(refuse=step + 1 in self.scenario.refusals)
        self._disturb(step)
        if step in self.scenario.restarts_in_flight:
            self._restart()
            # Answers of the old process may still arrive; they must not matter.
            while self.flight:
                self._take_answer(self.flight.popleft(), step)
        else:
            self._take_answer(self.flight.popleft(), step)

    def _send(self, batch: TokenRowBatch, *, refuse: bool) -> None:
        sampled = self.pool.run(batch, refuse=refuse)
        self.flight.append(_Sent(batch, sampled, self.pool.has_source, self.pool.cache.counts()))

    def _send_ahead(self, *, refuse: bool) -> None:
        """Send a step before the answer to the last one, where the core has one to send."""
        before = self.state.in_flight
        assert before is not None
        ahead = plan_ahead(self.state, lambda _: True)
        self.state.check_invariants()
        if ahead is None:
            return
        self.seen["ahead"] += 1
        assert self.state.ahead is ahead
        assert ahead.step_id == before.step_id + 1
        assert not {row.sequence_id for row in ahead.rows} & set(ahead.released_sequence_ids)
        assert not any(not request.is_paused for request in self.state.waiting)
        for row in ahead.rows:
            request = self.state.running[row.request_id]
            source = before.rows[row.source.wanted_index]
            assert source.request_id == row.request_id
            assert row.start_position == source.start_position + len(source.token_ids)
            assert len(request.output_token_ids) + 1 < request.max_tokens
            assert not request.is_paused
        self._send(ahead, refuse=refuse)

    def _take_answer(self, sent: _Sent, step: int) -> None:
        batch, sampled = sent.batch, sent.sampled
        num_vain_rows = self.state.num_vain_rows
        if self.state.in_flight is batch:
            record_kv_counts(self.state, sent.counts)
            # A machine that is now faster and now slower than its curve.
            pace = 1 + (step % 7) / 4
            record_step_seconds(self.state, batch, pace * batch.predicted_seconds)
        if sampled is not None:
            self._record(apply(self.state, batch, sampled))
        elif sent.has_source:
            self.seen["refused"] += 1
            self._record(capacity_refused(self.state, batch))
        else:
            self.seen["without source"] += 1
            source_refused(self.state, batch)
        self.seen["vain"] += self.state.num_vain_rows - num_vain_rows
        self.state.check_invariants()

    def _drafts(self, step: int) -> dict[RequestId, tuple[int, ...]]:
        """Return drafted tokens for all running requests, whether they may have any or not."""
        drafts: dict[RequestId, tuple[int, ...]] = {}
        for index, request in enumerate(self.state.running.values()):
            length, wrong = self.scenario.drafts[(step + index) % len(self.scenario.drafts)]
            known = list(request.tokens(0, request.num_tokens))
            for _ in range(length):
                known.append(next_token(known))
            drafted = known[len(known) - length :]
            if wrong < length:
                drafted[wrong] = (drafted[wrong] + 1) % VOCAB_SIZE
            drafts[request.request_id] = tuple(drafted)
        return drafts

    def _cancel(self, index: int | None) -> None:
        live = list(self.state.requests.values())
        if index is not None and index < len(live):
            self._record(cancel(self.state, live[index].request_id))

    def _disturb(self, step: int) -> None:
        """Cancel and stop requests while the step is in flight."""
        self._cancel(self.scenario.cancels.get(step))
        index = self.scenario.stop_strings.get(step)
        live = list(self.state.requests.values())
        if index is not None and index < len(live):
            self._record(finish_by_stop_string(self.state, live[index].request_id))

    def _check_batch(self, batch: TokenRowBatch) -> None:
        limits = self.state.limits
        self.seen["drafted"] += sum(row.num_draft_tokens for row in batch.rows)
        for row in batch.rows:
            assert len(row.wanted) in (0, row.num_draft_tokens + 1)
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.rows) <= limits.max_num_seqs
        assert len({row.request_id for row in batch.rows}) == len(batch.rows)
        assert all(1 <= len(row.token_ids) <= limits.max_prefill_chunk for row in batch.rows)
        rows = {row.sequence_id for row in batch.rows}
        assert not rows & set(batch.released_sequence_ids)
        first = leader(self.state)
        if first is not None:
            assert first.request_id in {row.request_id for row in batch.rows}
        assert not any(self.state.requests[row.request_id].is_paused for row in batch.rows)
        for name in {row.request_id for row in batch.rows}:
            assert self.state.requests[name].num_yields <= self.state.requests[name].priority
        self._check_seconds(batch)

    def _check_seconds(self, batch: TokenRowBatch) -> None:
        """Check that prompts keep the bound while somebody decodes, and the oldest advances."""
        curve = self.state.limits.cost_curve
        new = {each.request_id for each in batch.events if isinstance(each, RequestAdmitted)}
        old = [row for row in batch.rows if row.request_id not in new]
        decoding = [row for row in old if len(row.token_ids) == len(row.wanted)]
        prompts = [row for row in batch.rows if row not in decoding]
        num_tokens = sum(len(row.token_ids) for row in prompts)
        expected = curve.step_seconds(
            sum(len(row.wanted) for row in decoding),
            batch.num_tokens,
            sum(row.start_position * len(row.wanted) for row in decoding),
            sum(row.start_position * len(row.token_ids) for row in prompts),
        )
        assert batch.predicted_seconds == expected
        if num_tokens > 1 and decoding:
            self.seen["bounded"] += 1
            assert batch.predicted_seconds <= batch.bound_seconds * (1 + 1e-9)

    def _record(self, events: tuple[Event, ...] | list[Event]) -> None:
        for happened in events:
            assert happened.request_id not in self.ends, "nothing follows the end"
            self.seen[type(happened).__name__] += 1
            if isinstance(happened, RequestPreempted):
                self.seen[happened.reason.value] += 1
            if isinstance(happened, TokenEmitted):
                output = self.output[happened.request_id]
                assert happened.index == len(output)
                output.append(happened.token_id)
            elif isinstance(happened, RequestFinished):
                self.ends[happened.request_id] = happened.reason


def check_against_solo_runs(trace: Trace) -> None:
    """Check each request's tokens against a run without any scheduler."""
    for index, arrival in enumerate(trace.scenario.arrivals):
        name = str(index)
        alone = solo_run(arrival.prompt, arrival.max_tokens, STOP if arrival.stops else frozenset())
        output = trace.output[name]
        reason = trace.ends[name]
        assert output == alone[: len(output)]
        if reason is FinishReason.LENGTH:
            assert output == alone
            assert len(output) == arrival.max_tokens
        if reason is FinishReason.STOP and not trace.scenario.stop_strings:
            assert output == alone
            assert output[-1] in STOP
    assert not len(trace.pool.cache), "everything is given back"
    assert not trace.state.requests
    counts = trace.pool.cache.counts()
    assert counts.free + counts.evictable == counts.total


@many
@given(quiet)
def test_every_request_gets_the_tokens_of_its_solo_run(scenario: Scenario) -> None:
    """Budgets, chunks, block sizes and neighbours change no token, and every request ends."""
    trace = Trace(scenario)
    trace.run()
    event(f"bounded={trace.seen['bounded'] > 0}")
    event(f"hits={trace.seen['hits'] > 0}")
    event(f"waits={trace.seen['waits'] > 0}")
    for reason in PreemptionReason:
        event(f"{reason.value}={trace.seen[reason.value] > 0}")
    event(f"drafted={trace.seen['drafted'] > 0}")
    event(f"ahead={trace.seen['ahead'] > 0}")
    event(f"vain={trace.seen['vain'] > 0}")
    check_against_solo_runs(trace)
    for index, arrival in enumerate(scenario.arrivals):
        if arrival.deadline is None:
            assert trace.ends[str(index)] in (FinishReason.LENGTH, FinishReason.STOP)
    assert not trace.seen["refused"]


@many
@given(troubled)
def test_trouble_changes_no_token(scenario: Scenario) -> None:
    """Cancels in flight, restarts, refusals and a pool smaller than said: outputs stay prefixes."""
    trace = Trace(scenario)
    trace.run()
    event(f"refused={trace.seen['refused'] > 0}")
    event(f"without source={trace.seen['without source'] > 0}")
    event(f"vain={trace.seen['vain'] > 0}")
    for reason in PreemptionReason:
        event(f"{reason.value}={trace.seen[reason.value] > 0}")
    check_against_solo_runs(trace)


@given(quiet)
def test_a_trace_replays_exactly(scenario: Scenario) -> None:
    """The core has no hidden input: the same calls give the same events."""
    first, second = Trace(scenario), Trace(scenario)
    first.run()
    second.run()
    assert first.output == second.output
    assert first.ends == second.ends
    assert first.seen == second.seen
    assert first.pool.num_computed_tokens == second.pool.num_computed_tokens
