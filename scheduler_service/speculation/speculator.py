"""Speculation for all requests of one model: drafts before a step, learning after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scheduler_service.core.batch import SampledRow, TokenRow, TokenRowBatch
from scheduler_service.core.request import Request, RequestId, SequenceId
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import StepLoad, share_step
from scheduler_service.speculation.controller import Controller, PlainStep
from scheduler_service.speculation.costs import StepCosts, assumed_curve
from scheduler_service.speculation.proposer import Proposal, Proposer, ProposerKind

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


class Speculator:
    """Asks a proposer for drafts and a controller how much of them to try.

    Everything kept here is about speed: losing it, or a draft of any content, changes no token.
    """

    def __init__(self, proposer: Proposer, controller: Controller, max_draft_tokens: int) -> None:
        """Draft at most `max_draft_tokens` tokens for a row, from 1 to MAX_DRAFT_TOKENS."""
        self._proposer = proposer
        self._controller = controller
        self._max_draft_tokens = max_draft_tokens
        self._costs = StepCosts()
        self._known: set[SequenceId] = set()
        # Of the step that is planned or runs.
        self._proposals: dict[SequenceId, Proposal] = {}
        self._forecast: _Forecast | None = None

    @property
    def kind(self) -> ProposerKind:
        """Kind of the proposer."""
        return self._proposer.kind

    @property
    def num_known(self) -> int:
        """Sequences that something is kept for."""
        return len(self._known)

    def draft(self, state: SchedulerState) -> dict[RequestId, tuple[int, ...]]:
        """Return drafted tokens for requests whose next row has one token.

        `state` is not changed; no step is in flight.
        """
        self.forget_ended(state)
        forecast = self._forecast = _Forecast(state, self._costs)
        self._proposals = {}
        self._known.update(forecast.decoding)
        if forecast.num_room < 1 or len(forecast.decoding) > MAX_SEQUENCES:
            return {}
        for sequence_id, request in forecast.decoding.items():
            # The step draws one token more than it accepts.
            num_left = request.max_tokens - len(request.output_token_ids) - 1
            if num_left > 0 and request.takes_drafts:
                proposal = self._proposer.propose(request, min(self._max_draft_tokens, num_left))
                if proposal.token_ids:
                    self._proposals[sequence_id] = proposal
        if not self._proposals:
            return {}
        chosen = self._controller.choose(forecast.step(tuple(forecast.decoding)), self._proposals)
        return {
            forecast.decoding[sequence_id].request_id: self._proposals[sequence_id].token_ids[
                :count
            ]
            for sequence_id, count in chosen.items()
            if count
        }

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
            step_seconds: What it took.
        """
        counts: list[RowCounts] = []
        drawn: dict[SequenceId, int] = {}
        for row in batch.rows:
            came = sampled.get(row.request_id)
            if came is None or came.token_id is None or not _is_decode(row):
                continue
            drawn[row.sequence_id] = 1 + len(came.accepted_token_ids)
            proposal = self._proposals.get(row.sequence_id)
            if proposal is not None:
                tokens = (*came.accepted_token_ids, came.token_id)
                self._controller.learn(row.sequence_id, proposal, tokens)
            if row.num_draft_tokens:
                counts.append(RowCounts(row.num_draft_tokens, len(came.accepted_token_ids)))
        if self._forecast is not None:
            num_drafted = sum(row.num_draft_tokens for row in batch.rows)
            self._controller.settle(self._forecast.step(tuple(drawn)), num_drafted, drawn)
            if all(_is_decode(row) for row in batch.rows):
                self._costs.observe(batch.num_tokens, step_seconds, self._forecast.curve)
        self._proposals, self._forecast = {}, None
        return counts

    def forget_ended(self, state: SchedulerState) -> None:
        """Let go of sequences that have ended, once they may be half of those known."""
        if len(self._known) <= 2 * len(state.requests):
            return
        live = {request.sequence_id for request in state.requests.values()}
        for sequence_id in self._known - live:
            self._proposer.forget(sequence_id)
            self._controller.forget(sequence_id)
        self._known &= live


def _is_decode(row: TokenRow) -> bool:
    """Return whether a row has one known token, as every row that can have drafted ones."""
    return row.num_known_tokens == 1 and bool(row.wanted)


class _Forecast:
    """The next step as far as it can be told before it is planned: who decodes, what it costs."""

    def __init__(self, state: SchedulerState, costs: StepCosts) -> None:
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
        return PlainStep(sequence_ids, self.num_room, self._seconds, later)

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
