"""Speculation for all requests of one model: drafts before a step, learning after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from scheduler_service.core.batch import SampledRow, TokenRow, TokenRowBatch, TokenSourceKind
from scheduler_service.core.cost_curve import NO_CURVE, CostCurve
from scheduler_service.core.request import Request, RequestId, SequenceId
from scheduler_service.core.state import SchedulerState
from scheduler_service.speculation.ahead import Prospects
from scheduler_service.speculation.control import Controller, PlainStep
from scheduler_service.speculation.costs import StepCosts
from scheduler_service.speculation.draft_choice import Asking, Candidate
from scheduler_service.speculation.draft_costs import DraftCosts
from scheduler_service.speculation.draft_model import DraftModelProposer
from scheduler_service.speculation.draft_work import DraftReply, DraftRow, DraftWork
from scheduler_service.speculation.forecast import Forecast
from scheduler_service.speculation.naps import LONGEST_NAP, SHORTEST_NAP, Naps
from scheduler_service.speculation.proposer import NO_PROPOSAL, Proposal, Proposer, ProposerKind

MAX_DRAFT_TOKENS: Final = 16
"""Most drafted tokens of a row that can be asked for."""

MAX_SEQUENCES: Final = 64
"""Sequences beyond which nobody drafts: rows of neighbours fill a step as well as drafts would, and
asking for each costs some microseconds."""


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
        # Of the step that is planned or runs: proposals that were made, the one to be tried,
        # whether accounts alone keep drafts out, and what it was like; None where nobody looked.
        self._made: dict[SequenceId, list[Proposal]] = {}
        self._proposals: dict[SequenceId, Proposal] = {}
        self._is_held_back = False
        self._forecast: Forecast | None = None
        # What the proposer said last of each sequence, and of how many known tokens.
        self._looked_up: dict[SequenceId, tuple[tuple[int, int], Proposal]] = {}
        self._prospects = Prospects()
        self._naps = Naps()
        # Of the requests to the draft model since the last step.
        self._num_asked = 0
        self._spent_seconds = 0.0
        self._asked_forecast: Forecast | None = None

    @property
    def num_known(self) -> int:
        """Sequences that something is kept for."""
        return len(self._known)

    @property
    def has_draft_model(self) -> bool:
        """Whether the executor's draft model may be asked."""
        return self._draft_model is not None

    def ask(self, state: SchedulerState, *, goes_ahead: bool = False) -> DraftWork | None:
        """Return work for the draft model before the next step, or None when there is no more.

        `state` is not changed; no step is in flight. After None, `draft` follows at once.
        `goes_ahead` says whether steps without drafts may be sent ahead of an answer.
        """
        self._asked_forecast = None
        model = self._draft_model
        if self._naps.is_on(len(state.running)):
            return None
        if model is None or (self._num_asked and not self._controller.asks_again):
            return None
        forecast = self._asked_forecast = Forecast(state, self._costs, goes_ahead=goes_ahead)
        if not _has_place(forecast):
            return None
        self._meet(forecast)
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
            found = self._look_up(request, most)
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

    def draft(
        self, state: SchedulerState, *, goes_ahead: bool = False
    ) -> dict[RequestId, tuple[int, ...]]:
        """Return drafted tokens for requests whose next row has one token.

        `state` is not changed; no step is in flight. `goes_ahead` is that of `ask`.
        """
        self._forget_step()
        num_running = len(state.running)
        if self._naps.is_on(num_running):
            return {}
        has_asked = self._num_asked > 0
        drafts = self._look(state, goes_ahead=goes_ahead)
        longest = SHORTEST_NAP if self._is_held_back else LONGEST_NAP
        if self._controller.asks_again:
            longest = 0
        self._naps.note_look(num_running, longest, has_found=bool(drafts), has_asked=has_asked)
        return drafts

    def _forget_step(self) -> None:
        self._made, self._proposals = {}, {}
        self._forecast, self._is_held_back = None, False

    def _look(self, state: SchedulerState, *, goes_ahead: bool) -> dict[RequestId, tuple[int, ...]]:
        self.forget_ended(state)
        # Where nothing was asked, that of `ask` holds: nothing has happened since.
        forecast = self._forecast = self._asked_forecast or Forecast(
            state, self._costs, goes_ahead=goes_ahead
        )
        forecast.spent_seconds, self._asked_forecast = self._spent_seconds, None
        self._num_asked, self._spent_seconds = 0, 0.0
        self._meet(forecast)
        if forecast.num_room < 1 or len(forecast.decoding) > MAX_SEQUENCES:
            return {}
        for sequence_id, request in forecast.decoding.items():
            # The step draws one token more than it accepts.
            num_left = request.max_tokens - len(request.output_token_ids) - 1
            if num_left > 0 and request.takes_drafts:
                self._propose(sequence_id, request, min(self._max_draft_tokens, num_left))
        chosen = self._choose(forecast, is_in_flight=state.in_flight is not None)
        return {
            forecast.decoding[sequence_id].request_id: self._proposals[sequence_id].token_ids[
                :count
            ]
            for sequence_id, count in chosen.items()
            if count
        }

    def _meet(self, forecast: Forecast) -> None:
        """Know who decodes from now on, before anything is kept of it: it may end at any await."""
        for sequence_id in forecast.decoding.keys() - self._known:
            seconds = forecast.prompt_seconds(forecast.decoding[sequence_id])
            self._controller.count_plain(sequence_id, seconds)
        self._known.update(forecast.decoding)

    def _choose(self, forecast: Forecast, *, is_in_flight: bool) -> dict[SequenceId, int]:
        """Return how much of the proposals is worth a try."""
        chosen: dict[SequenceId, int] = {}
        gain = None
        if self._proposals:
            step = forecast.step(tuple(forecast.decoding))
            if is_in_flight:
                # Of the next step that would be, and it would wait to begin with.
                step = replace(step, spent_seconds=step.ahead_seconds)
            chosen = self._controller.choose(step, self._proposals)
            if not any(chosen.values()):
                self._is_held_back = self._controller.is_held_back(step, self._proposals)
            else:
                gain = self._controller.gain(step, self._proposals, chosen) / step.plain_seconds
        self._prospects.observe(gain)
        return chosen

    def may_draft(self, state: SchedulerState) -> bool:
        """Return whether the step after the one in flight waits for its answer.

        Drafts go behind tokens that are known. So it waits where what they are expected to gain is
        more than sending it ahead saves, and accounts allow it. What would have been drafted for
        the step in flight says how likely there is something; `draft` is not called before `learn`.
        """
        if self._naps.is_on(len(state.running)):
            return False
        if self._controller.asks_again:
            return True
        if self._forecast is None:
            self.draft(state, goes_ahead=True)
        forecast = self._forecast
        if forecast is None or not _has_place(forecast):
            return False
        step = forecast.step(tuple(forecast.decoding))
        return (
            self._prospects.gain * step.plain_seconds > step.ahead_seconds
            and (self._prospects.has_found or self._controller.may_wait(step))
        ) or self._would_ask(forecast, step)

    def _would_ask(self, forecast: Forecast, step: PlainStep) -> bool:
        """Return whether the draft model would be asked for the step in flight."""
        model = self._draft_model
        if model is None:
            return False
        self._draft_costs.set_plain_step(step.next_seconds)
        if not self._controller.may_ask(step, self._draft_costs):
            return False
        candidates = self._candidates(model, forecast.decoding)
        return bool(self._controller.ask(step, candidates, self._draft_costs, is_trial=True))

    def _propose(self, sequence_id: SequenceId, request: Request, most: int) -> None:
        """Note what the proposers have; that of the draft model was asked for with reason."""
        proposals = [self._look_up(request, most)]
        if self._draft_model is not None:
            proposals.append(self._draft_model.propose(request, most))
        for proposal in proposals:
            if proposal.token_ids:
                self._made.setdefault(sequence_id, []).append(proposal)
                self._proposals[sequence_id] = proposal

    def _look_up(self, request: Request, most: int) -> Proposal:
        """Return what the proposer has, which is asked once for the same known tokens."""
        if self._proposer is None:
            return NO_PROPOSAL
        asked = (request.num_tokens, most)
        known = self._looked_up.get(request.sequence_id)
        if known is not None and known[0] == asked:
            return known[1]
        found = self._proposer.propose(request, most)
        self._looked_up[request.sequence_id] = (asked, found)
        return found

    def learn(
        self,
        batch: TokenRowBatch,
        sampled: Mapping[RequestId, SampledRow],
        step_seconds: float,
    ) -> list[RowCounts]:
        """Take in a computed step; return the counts of its rows with drafted tokens.

        Args:
            batch: The step that the last drafts went into.
            sampled: What came of its rows, without those of requests that have ended.
            step_seconds: What it took, without asking the draft model before.
        """
        counts: list[RowCounts] = []
        forecast = self._forecast
        num_unbooked = self._naps.count_step(was_looked_at=forecast is not None)
        if forecast is None:
            return counts
        drawn: dict[SequenceId, int] = {}
        for row in batch.rows:
            came = sampled.get(row.request_id)
            if came is None or came.token_id is None or not _is_decode(row):
                continue
            if row.sequence_id not in self._known:
                continue  # the last token of a prompt: it may have been its last step as well
            drawn[row.sequence_id] = 1 + len(came.accepted_token_ids)
            tokens = (*came.accepted_token_ids, came.token_id)
            for proposal in self._made.get(row.sequence_id, ()):
                self._controller.learn(row.sequence_id, proposal, tokens)
            if row.num_draft_tokens:
                kind = self._proposals[row.sequence_id].kind
                accepted = len(came.accepted_token_ids)
                counts.append(RowCounts(row.num_draft_tokens, accepted, kind))
        num_drafted = sum(row.num_draft_tokens for row in batch.rows)
        is_ahead = any(row.source.kind is TokenSourceKind.STEP_OUTPUT for row in batch.rows)
        if all(_is_decode(row) for row in batch.rows):
            # First, so that accounts know of what the step was seen to take.
            self._costs.observe(
                batch.num_tokens, step_seconds, forecast.curve,
                num_drafts=num_drafted, is_ahead=is_ahead,
            )  # fmt: skip
        took_part = tuple(row.sequence_id for row in batch.rows if _is_decode(row))
        step = forecast.step(took_part, is_ahead=is_ahead)
        for sequence_id in drawn if num_unbooked else ():
            self._controller.count_plain(sequence_id, num_unbooked * step.next_seconds)
        self._controller.settle(step, num_drafted, drawn)
        self._forget_step()
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
            self._looked_up.pop(sequence_id, None)
            self._controller.forget(sequence_id)
        self._known &= live


def _has_place(forecast: Forecast) -> bool:
    """Return whether a step can have drafts at all."""
    return forecast.num_room >= 1 and 0 < len(forecast.decoding) <= MAX_SEQUENCES


def _is_decode(row: TokenRow) -> bool:
    """Return whether a row has one known token, as every row that can have drafted ones."""
    return row.num_known_tokens == 1 and bool(row.wanted)
