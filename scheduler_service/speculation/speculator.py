"""Speculation for all requests of one model: drafts before a step, learning after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler_service.core.batch import SampledRow, TokenRow, TokenRowBatch
from scheduler_service.core.cost_curve import NO_CURVE, CostCurve
from scheduler_service.core.request import Request, RequestId, SequenceId
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import StepLoad, share_step
from scheduler_service.speculation.control import Controller, PlainStep
from scheduler_service.speculation.costs import StepCosts, assumed_curve
from scheduler_service.speculation.draft_choice import Asking, Candidate
from scheduler_service.speculation.draft_costs import DraftCosts
from scheduler_service.speculation.draft_model import DraftModelProposer
from scheduler_service.speculation.draft_work import DraftReply, DraftRow, DraftWork
from scheduler_service.speculation.proposer import Proposal, Proposer, ProposerKind

MAX_DRAFT_TOKENS: Final = 16
"""Most drafted tokens of a row that can be asked for."""

MAX_SEQUENCES: Final = 64
"""Sequences beyond which nobody drafts: rows of neighbours fill a step as well as drafts would, and
asking for each costs some microseconds."""


QUIET_STEPS: Final = 4
"""Steps without any draft after which none is expected for the next."""

LONGEST_NAP: Final = 8
"""Most steps from one look for drafts to the next, after many looks that found nothing worth a try:
looking costs some tenths of a millisecond where a forward pass has emptied the caches."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What came of the drafted tokens of one row."""

    num_drafted: int
    num_accepted: int
    kind: ProposerKind = ProposerKind.LOOKUP


class Speculator:
    """Asks proposers for drafts and a controller how much of them to try.

    Before a step `ask` says what the executor's draft model is to do, `take` notes its answer, and
    `draft` gives the drafted tokens; without a draft model `draft` is all. After it, `learn`.

    Everything kept here is about speed: losing it, or a draft of any content, changes no token.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        controller: Controller,
        max_draft_tokens: int,
        draft_model: DraftModelProposer | None = None,
        draft_curve: CostCurve = NO_CURVE,
    ) -> None:
        """Draft at most `max_draft_tokens` tokens for a row, from 1 to MAX_DRAFT_TOKENS.

        Where both `proposer` and `draft_model` can draft for a sequence, the controller says whom
        it takes. `draft_curve` is the cost curve of the draft model.
        """
        self._proposer = proposer
        self._controller = controller
        self._max_draft_tokens = max_draft_tokens
        self._draft_model = draft_model
        self._draft_costs = DraftCosts(draft_curve)
        self._costs = StepCosts()
        self._known: set[SequenceId] = set()
        # Of the step that is planned or runs: proposals that were made, and the one to be tried.
        self._made: dict[SequenceId, list[Proposal]] = {}
        self._proposals: dict[SequenceId, Proposal] = {}
        self._forecast: _Forecast | None = None
        # Of the requests to the draft model since the last step.
        self._num_asked = 0
        self._spent_seconds = 0.0
        self._asked_forecast: _Forecast | None = None
        # Steps since anything was drafted or asked for.
        self._num_quiet = 0
        # Of a nap: how many steps it still takes, how long the last one was, and who ran then.
        self._nap_left = 0
        self._nap = 0
        self._num_running = 0

    @property
    def num_known(self) -> int:
        """Sequences that something is kept for."""
        return len(self._known)

    def ask(self, state: SchedulerState) -> DraftWork | None:
        """Return work for the draft model before the next step, or None when there is no more.

        `state` is not changed; no step is in flight. After None, `draft` follows at once.
        """
        self._asked_forecast = None
        model = self._draft_model
        if self._naps(state):
            return None
        if model is None or (self._num_asked and not self._controller.asks_again):
            return None
        forecast = self._asked_forecast = _Forecast(state, self._costs)
        if forecast.num_room < 1 or not 0 < len(forecast.decoding) <= MAX_SEQUENCES:
            return None
        step = forecast.step(tuple(forecast.decoding))
        self._draft_costs.set_plain_step(step.next_seconds)
        if not self._controller.may_ask(step, self._draft_costs):
            return None
        candidates = self._candidates(model, forecast.decoding)
        if not candidates:
            return None
        asking = self._controller.ask(step, candidates, self._draft_costs)
        rows = self._rows(model, forecast.decoding, asking) if asking else ()
        if not rows:
            return None
        # The state may change while the draft model works.
        self._asked_forecast = None
        self._num_asked += 1
        work = DraftWork(rows)
        return replace(work, expected_seconds=self._draft_costs.work_seconds(work))

    def _candidates(
        self, model: DraftModelProposer, decoding: Mapping[SequenceId, Request]
    ) -> dict[SequenceId, Candidate]:
        """Return the sequences that the draft model can be asked for and a lookup cannot."""
        candidates: dict[SequenceId, Candidate] = {}
        for sequence_id, request in decoding.items():
            num_left = request.max_tokens - len(request.output_token_ids) - 1
            if num_left < 1 or not request.takes_drafts or not model.can_draft(request):
                continue
            most = min(self._max_draft_tokens, num_left)
            if self._proposer is not None:
                found = self._proposer.propose(request, most)
                if self._controller.prefers_lookup(sequence_id, found):
                    continue
            candidates[sequence_id] = Candidate(most, model.num_missing(request))
        return candidates

    def _rows(
        self, model: DraftModelProposer, decoding: Mapping[SequenceId, Request], asking: Asking
    ) -> tuple[DraftRow, ...]:
        rows: list[DraftRow] = []
        room = model.max_tokens
        for sequence_id, most in asking.num_drafts.items():
            row = model.row(decoding[sequence_id], most, asking.min_confidence)
            if len(rows) == model.max_rows or len(row.token_ids) > room:
                break
            rows.append(row)
            room -= len(row.token_ids)
        return tuple(rows)

    def take(self, work: DraftWork, reply: DraftReply, wall_seconds: float) -> None:
        """Note the draft model's answer, and what it took from before it was asked."""
        if self._draft_model is None:
            return
        self._draft_model.take(work, reply)
        done = replace(
            work,
            rows=tuple(
                replace(row, max_drafts=len(came.token_ids))
                for row, came in zip(work.rows, reply.rows, strict=True)
            ),
        )
        expected = self._draft_costs.work_seconds(done)
        self._draft_costs.observe(expected, reply.pass_seconds, wall_seconds)
        # What is expected of such a request, as with steps: a single time is mostly noise.
        self._spent_seconds += self._draft_costs.overhead_seconds + expected

    def draft(self, state: SchedulerState) -> dict[RequestId, tuple[int, ...]]:
        """Return drafted tokens for requests whose next row has one token.

        `state` is not changed; no step is in flight.
        """
        if self._naps(state):
            return {}
        drafts = self._look(state)
        if drafts:
            self._nap = 0
        elif self._num_quiet >= QUIET_STEPS and not self._controller.asks_again:
            self._nap = min(LONGEST_NAP, 2 * self._nap or 1)
            self._nap_left, self._num_running = self._nap, len(state.running)
        return drafts

    def _naps(self, state: SchedulerState) -> bool:
        """Return whether nobody looks for drafts now; who comes or goes ends a nap."""
        if self._nap_left and len(state.running) != self._num_running:
            self._nap_left = self._nap = 0
        return self._nap_left > 0

    def _look(self, state: SchedulerState) -> dict[RequestId, tuple[int, ...]]:
        self.forget_ended(state)
        # Where nothing was asked, that of `ask` holds: nothing has happened since.
        forecast = self._forecast = self._asked_forecast or _Forecast(state, self._costs)
        forecast.spent_seconds, self._asked_forecast = self._spent_seconds, None
        self._num_quiet = 0 if self._num_asked else self._num_quiet + 1
        self._num_asked, self._spent_seconds = 0, 0.0
        self._made, self._proposals = {}, {}
        for sequence_id in forecast.decoding.keys() - self._known:
            seconds = forecast.prompt_seconds(forecast.decoding[sequence_id])
            self._controller.begin(sequence_id, seconds)
        self._known.update(forecast.decoding)
        if forecast.num_room < 1 or len(forecast.decoding) > MAX_SEQUENCES:
            return {}
        for sequence_id, request in forecast.decoding.items():
            # The step draws one token more than it accepts.
            num_left = request.max_tokens - len(request.output_token_ids) - 1
            if num_left > 0 and request.takes_drafts:
                self._propose(sequence_id, request, min(self._max_draft_tokens, num_left))
        if not self._proposals:
            return {}
        chosen = self._controller.choose(forecast.step(tuple(forecast.decoding)), self._proposals)
        if any(chosen.values()):
            self._num_quiet = 0
        return {
            forecast.decoding[sequence_id].request_id: self._proposals[sequence_id].token_ids[
                :count
            ]
            for sequence_id, count in chosen.items()
            if count
        }

    def may_draft(self, state: SchedulerState) -> bool:
        """Return whether drafts are to be expected soon, while a step is in flight.

        Then the step after it waits for the answer: drafts go behind tokens that are known. After a
        quiet while that is so only where there would be drafts for the step in flight itself.
        """
        if self._naps(state):
            return False
        is_fixed = self._controller.asks_again
        if is_fixed or self._num_quiet < QUIET_STEPS or self.draft(state):
            return True
        model, forecast = self._draft_model, self._forecast
        if model is None or forecast is None or not forecast.decoding or forecast.num_room < 1:
            return False
        step = forecast.step(tuple(forecast.decoding))
        self._draft_costs.set_plain_step(step.next_seconds)
        if not self._controller.may_ask(step, self._draft_costs):
            return False
        candidates = self._candidates(model, forecast.decoding)
        return bool(self._controller.ask(step, candidates, self._draft_costs, is_trial=True))

    def _propose(self, sequence_id: SequenceId, request: Request, most: int) -> None:
        """Note what the proposers have; that of the draft model was asked for with reason."""
        for proposer in (self._proposer, self._draft_model):
            if proposer is None:
                continue
            proposal = proposer.propose(request, most)
            if proposal.token_ids:
                self._made.setdefault(sequence_id, []).append(proposal)
                self._proposals[sequence_id] = proposal

    def learn(
        self,
        batch: TokenRowBatch,
        sampled: Mapping[RequestId, SampledRow],
        step_seconds: float,
    ) -> list[RowCounts]:
        """Take in a computed step; return the counts of its rows with drafted tokens.

        Args:
            batch: The step that the last drafts went into.
            sampled: What came of its rows.
            step_seconds: What it took, without asking the draft model before.
        """
        self._nap_left = max(0, self._nap_left - 1)
        counts: list[RowCounts] = []
        if self._forecast is None and not self._proposals:
            return counts  # nobody looked for drafts of this step
        drawn: dict[SequenceId, int] = {}
        for row in batch.rows:
            came = sampled.get(row.request_id)
            if came is None or came.token_id is None or not _is_decode(row):
                continue
            drawn[row.sequence_id] = 1 + len(came.accepted_token_ids)
            tokens = (*came.accepted_token_ids, came.token_id)
            for proposal in self._made.get(row.sequence_id, ()):
                self._controller.learn(row.sequence_id, proposal, tokens)
            if row.num_draft_tokens:
                kind = self._proposals[row.sequence_id].kind
                accepted = len(came.accepted_token_ids)
                counts.append(RowCounts(row.num_draft_tokens, accepted, kind))
        if self._forecast is not None:
            num_drafted = sum(row.num_draft_tokens for row in batch.rows)
            self._controller.settle(self._forecast.step(tuple(drawn)), num_drafted, drawn)
            if all(_is_decode(row) for row in batch.rows):
                self._costs.observe(batch.num_tokens, step_seconds, self._forecast.curve)
        self._made, self._proposals, self._forecast = {}, {}, None
        return counts

    def forget_ended(self, state: SchedulerState) -> None:
        """Let go of sequences that have ended, once they may be half of those known."""
        if len(self._known) <= 2 * len(state.requests):
            return
        live = {request.sequence_id for request in state.requests.values()}
        for sequence_id in self._known - live:
            for proposer in (self._proposer, self._draft_model):
                if proposer is not None:
                    proposer.forget(sequence_id)
            self._controller.forget(sequence_id)
        self._known &= live


def _is_decode(row: TokenRow) -> bool:
    """Return whether a row has one known token, as every row that can have drafted ones."""
    return row.num_known_tokens == 1 and bool(row.wanted)


class _Forecast:
    """The next step as far as it can be told before it is planned: who decodes, what it costs."""

    def __init__(self, state: SchedulerState, costs: StepCosts) -> None:
        # What asking the draft model took.
        self.spent_seconds = 0.0
        self.decoding: dict[SequenceId, Request] = {}
        self._costs = costs
        self._curve = state.limits.cost_curve
        self._num_positions = 0
        self._prompts = StepLoad(self._curve)
        prompts: list[Request] = []
        for request in state.running.values():
            if request.is_paused:
                continue
            if request.num_uncomputed_tokens > 1:
                prompts.append(request)
            else:
                self.decoding[request.sequence_id] = request
                self._num_positions += request.num_computed_tokens
        shares = share_step(state, ()).num_tokens if prompts else {}
        for request in prompts:
            share = shares.get(request.request_id, 0)
            self._prompts.add_prompt(share, request.num_computed_tokens)
        num_tokens = len(self.decoding) + self._prompts.num_prompt_tokens
        self.num_room = state.limits.max_num_batched_tokens - num_tokens

    def step(self, sequence_ids: Sequence[SequenceId]) -> PlainStep:
        """Return the step without drafts, with a token for each of these sequences."""
        later = self._costs.seconds(len(sequence_ids), self.curve)
        return PlainStep(sequence_ids, self.num_room, self._seconds, later, self.spent_seconds)

    def prompt_seconds(self, request: Request) -> float:
        """Return what the prompt of a request took that decodes now; 0 without a curve."""
        num_tokens = request.num_computed_tokens - request.num_cached_tokens
        return self._costs.pace * self._curve.step_seconds(0, max(0, num_tokens))

    def curve(self, num_rows: int) -> float:
        """Return the curve's seconds of a step of decode rows alone; drafts count as rows."""
        if not self._curve:
            return assumed_curve(num_rows)
        return self._curve.step_seconds(num_rows, num_rows, self._num_positions_of(num_rows))

    def _num_positions_of(self, num_rows: int) -> int:
        # A draft looks at about as many positions as the rows themselves.
        return self._num_positions * num_rows // max(1, len(self.decoding))

    def _seconds(self, num_rows: int) -> float:
        prompts = self._prompts
        if not prompts.num_prompt_tokens:
            return self._costs.seconds(num_rows, self.curve)
        num_tokens = num_rows + prompts.num_prompt_tokens
        if not self._curve:
            return self._costs.pace * assumed_curve(num_tokens)
        return self._costs.pace * self._curve.step_seconds(
            num_rows, num_tokens, self._num_positions_of(num_rows), prompts.num_prompt_positions
        )
