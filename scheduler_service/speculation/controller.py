"""How many drafts of each sequence go into the next step.

What is wanted is the most tokens a second over all sequences, and that nobody pays for it:

- **Gain.** A draft is accepted with the share that the sequence has seen at this strength, times
  that of the drafts before it. The drafts of all sequences are taken in order of that product,
  and of all their numbers the one with the most expected tokens a second wins. As the whole range
  is looked at, steps in the cost curve (a kernel path that begins at the next row) do no harm.
- **Account.** Each sequence has an account of the time that it took and of the time that it would
  have taken with no drafts at all, in the seconds of the cost curve. A step may cost more only as
  far as the account of every sequence in it stays above `-TOLERANCE` of its plain time (and a
  fraction of a step to begin with). So text that accepts nothing cannot be slowed by more, neither
  by its own drafts nor by those of its neighbours, whatever the shares were thought to be. Where
  an account is the bound, the drafts of whoever has the least come first.

What was saved counts as credit up to a bound, so that a stretch that went well does not pay for a
long one that does not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from scheduler_service.core.request import SequenceId
from scheduler_service.speculation.acceptance import DRAFT_PRIOR, Acceptance, draft_level
from scheduler_service.speculation.control import PlainStep
from scheduler_service.speculation.draft_choice import (
    FIRST_WAIT,
    NOTHING,
    Asking,
    Candidate,
    DraftRecord,
    DraftStep,
)
from scheduler_service.speculation.draft_choice import choose as choose_asking
from scheduler_service.speculation.draft_costs import DraftCosts
from scheduler_service.speculation.proposer import Proposal, ProposerKind

_Draft: TypeAlias = tuple[float, float, int, SequenceId]
# (rank, -chance, index in its proposal, sequence), so that a heap gives the likeliest first and
# equal chances in turn.

TOLERANCE: Final = 0.015
"""Share of its plain time that a sequence may lose."""

FIRST_STEPS: Final = 0.25
"""Plain steps that a sequence may lose besides: a draft must be affordable before long."""

SURE_CHANCE: Final = 0.75
SURE_STEPS: Final = 0.35
"""Plain steps more that a sequence may lose to its own drafts where the first has such a chance: a
long match is not passed by until others could be afforded. Neighbours do not pay for it."""

INVESTED_STEPS: Final = 1.0
"""Plain steps more that a sequence may lose while the draft model has not proved bad with others:
it must read before it can gain anything."""

PROVED_SHARE: Final = 0.4
PROVED_DRAFTS: Final = 12.0
"""What proves it: fewer of its drafts right than this share, of about so many that fade."""

MAX_CREDIT_STEPS: Final = 8.0
"""Plain steps that can stand on an account."""

MIN_GAIN: Final = 1.06
"""Tokens a second that drafts must promise, over none: the curve is an estimate."""

MIN_CHANCE: Final = 0.02
"""Chance below which a draft is not looked at: it saves looking at all."""


_SHARED_DECAY: Final = 0.995
_SHARED_WEIGHT: Final = 3.0
_FIRST_SHARE: Final = 0.5
_FIRST_WEIGHT: Final = 6.0


@dataclass(slots=True)
class _Record:
    # By the draft model: shares by confidence, and on the whole.
    drafted: Acceptance
    on_the_whole: DraftRecord
    acceptance: Acceptance = field(default_factory=Acceptance)
    # Seconds without drafts, and how many of them were saved; below 0 when lost.
    plain_seconds: float = 0.0
    saved_seconds: float = 0.0

    def spendable(self, step_seconds: float, num_first: float = FIRST_STEPS) -> float:
        """Return the seconds by which a plain step of so many may be exceeded."""
        slack = TOLERANCE * (self.plain_seconds + step_seconds) + num_first * step_seconds
        return self.saved_seconds + slack


class AdaptiveController:
    """The controller of the module's description."""

    asks_again = False

    def __init__(self) -> None:
        self._records: dict[SequenceId, _Record] = {}
        # Of the draft model over all sequences: what a new one is expected to be like.
        self._drafted = Acceptance(DRAFT_PRIOR, decay=_SHARED_DECAY)
        self._on_the_whole = DraftRecord(_FIRST_SHARE, _FIRST_WEIGHT)

    def __len__(self) -> int:
        """Return how many sequences something is kept for."""
        return len(self._records)

    def _record(self, sequence_id: SequenceId) -> _Record:
        record = self._records.get(sequence_id)
        if record is None:
            drafted = Acceptance(self._drafted.shares(), _SHARED_WEIGHT)
            record = _Record(drafted, DraftRecord(self._on_the_whole.share, _FIRST_WEIGHT))
            self._records[sequence_id] = record
        return record

    def _first_steps(self) -> float:
        """Return the plain steps that a sequence may lose to the draft model to begin with."""
        whole = self._on_the_whole
        is_bad = whole.weight >= PROVED_DRAFTS and whole.share < PROVED_SHARE
        return FIRST_STEPS if is_bad else FIRST_STEPS + INVESTED_STEPS

    def count_plain(self, sequence_id: SequenceId, plain_seconds: float) -> None:
        """Count time without drafts, the prompt's too: the user waited for that as well."""
        self._record(sequence_id).plain_seconds += plain_seconds

    def _share(self, sequence_id: SequenceId, proposal: Proposal, index: int) -> float:
        """Return the expected chance of a draft, when those before it are right."""
        record = self._record(sequence_id)
        by_level = record.acceptance if proposal.kind is ProposerKind.LOOKUP else record.drafted
        return by_level.share_at(draft_level(proposal, index))

    def prefers_lookup(self, sequence_id: SequenceId, proposal: Proposal) -> bool:
        """Return whether a lookup's proposal is better than asking the draft model."""
        if not proposal.token_ids:
            return False
        share = self._record(sequence_id).on_the_whole.share
        return self._share(sequence_id, proposal, 0) >= share

    def may_ask(self, step: PlainStep, costs: DraftCosts) -> bool:
        """Return whether accounts allow to ask the draft model at all."""
        least = costs.overhead_seconds + costs.pass_seconds(1) + step.ahead_seconds
        return min(self._accounts(step, self._first_steps()).values()) > least

    def is_held_back(self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]) -> bool:
        """Return whether some drafts would be tried if accounts allowed it."""
        if not proposals or step.num_room < 1 or step.plain_seconds <= 0:
            return False
        return bool(self._pick(step, proposals, math.inf, dict.fromkeys(proposals, 0.0))[0])

    def may_wait(self, step: PlainStep) -> bool:
        """Return whether accounts allow not to send a step ahead, so that it may have drafts."""
        accounts = self._accounts(step, FIRST_STEPS)
        return min(accounts.values(), default=0.0) > step.ahead_seconds

    def _accounts(self, step: PlainStep, num_first: float) -> dict[SequenceId, float]:
        """Return by how many seconds each sequence allows the plain step to be exceeded."""
        seconds = step.plain_seconds
        return {
            each: self._record(each).spendable(seconds, num_first) for each in step.sequence_ids
        }

    def ask(
        self,
        step: PlainStep,
        candidates: Mapping[SequenceId, Candidate],
        costs: DraftCosts,
        *,
        is_trial: bool = False,
    ) -> Asking:
        """Return what to ask of the draft model before the step; a trial notes nothing."""
        if step.plain_seconds <= 0 or step.num_room < 1 or not candidates:
            return NOTHING
        accounts = self._accounts(step, self._first_steps())
        spendable = min(accounts.values())
        records = {each: self._record(each).on_the_whole for each in candidates}
        room = DraftStep(
            len(step.sequence_ids), step.num_room, step.seconds, spendable, step.ahead_seconds
        )
        return choose_asking(
            room, candidates, records, costs, MIN_GAIN, accounts, is_trial=is_trial
        )

    def saved_seconds(self, sequence_id: SequenceId) -> float:
        """Return what stands on a sequence's account, in seconds of the cost curve."""
        return self._record(sequence_id).saved_seconds

    def choose(
        self, step: PlainStep, proposals: Mapping[SequenceId, Proposal]
    ) -> dict[SequenceId, int]:
        """Return how many drafts of each proposal go into the step."""
        if not proposals or step.num_room < 1:
            return {}
        plain_seconds = step.plain_seconds
        if plain_seconds <= 0:
            return {}
        is_drafted = any(each.kind is ProposerKind.DRAFT for each in proposals.values())
        first = self._first_steps() if is_drafted else FIRST_STEPS
        accounts = self._accounts(step, first)
        for sequence_id, proposal in proposals.items():
            if self._share(sequence_id, proposal, 0) >= SURE_CHANCE:
                accounts[sequence_id] += SURE_STEPS * plain_seconds
        spendable = min(accounts.values()) - step.spent_seconds
        taken, is_bounded = self._pick(step, proposals, spendable, dict.fromkeys(proposals, 0.0))
        if is_bounded:
            # Who has the least on its account earns first, or it would hold the others for long.
            taken = self._pick(step, proposals, spendable, accounts)[0] or taken
        chosen: dict[SequenceId, int] = {}
        for sequence_id in taken:
            chosen[sequence_id] = chosen.get(sequence_id, 0) + 1
        return chosen

    def gain(
        self,
        step: PlainStep,
        proposals: Mapping[SequenceId, Proposal],
        chosen: Mapping[SequenceId, int],
    ) -> float:
        """Return what the chosen drafts are expected to save, in seconds of plain steps."""
        num_more = 0.0
        for sequence_id, count in chosen.items():
            chance = 1.0
            for index in range(count):
                chance *= self._share(sequence_id, proposals[sequence_id], index)
                num_more += chance
        num_plain = len(step.sequence_ids)
        saved = num_more * step.plain_seconds / max(1, num_plain)
        return saved - (step.seconds(num_plain + sum(chosen.values())) - step.plain_seconds)

    def _pick(
        self,
        step: PlainStep,
        proposals: Mapping[SequenceId, Proposal],
        spendable: float,
        ranks: Mapping[SequenceId, float],
    ) -> tuple[list[SequenceId], bool]:
        """Return the sequences of the drafts to try, and whether accounts were the bound.

        Drafts are taken by the rank of their sequence, then by chance.
        """
        queue: list[_Draft] = []
        for sequence_id, proposal in proposals.items():
            self._push(queue, ranks[sequence_id], sequence_id, proposal, 0, 1.0)
        plain_seconds = step.plain_seconds
        num_plain = len(step.sequence_ids)
        num_expected = float(num_plain)
        best_rate = MIN_GAIN * num_expected / plain_seconds
        taken: list[SequenceId] = []
        num_best = 0
        while queue and len(taken) < step.num_room:
            rank, chance, index, sequence_id = heapq.heappop(queue)
            taken.append(sequence_id)
            num_expected -= chance
            seconds = step.seconds(num_plain + len(taken))
            if seconds - plain_seconds > spendable:
                return taken[:num_best], True
            if num_expected / seconds >= best_rate:
                num_best, best_rate = len(taken), num_expected / seconds
            self._push(queue, rank, sequence_id, proposals[sequence_id], index + 1, -chance)
        return taken[:num_best], False

    def _push(
        self,
        queue: list[_Draft],
        rank: float,
        sequence_id: SequenceId,
        proposal: Proposal,
        index: int,
        chance_before: float,
    ) -> None:
        if index < len(proposal.token_ids):
            chance = chance_before * self._share(sequence_id, proposal, index)
            if chance >= MIN_CHANCE:
                heapq.heappush(queue, (rank, -chance, index, sequence_id))

    def learn(self, sequence_id: SequenceId, proposal: Proposal, drawn: tuple[int, ...]) -> None:
        """Take in the tokens that came where a proposal was made, however much of it was tried."""
        record = self._record(sequence_id)
        if proposal.kind is ProposerKind.LOOKUP:
            record.acceptance.learn_proposal(proposal, drawn)
            return
        num_right = record.drafted.learn_proposal(proposal, drawn)
        self._drafted.learn_proposal(proposal, drawn)
        # More drafts may have been right than there were tokens drawn for.
        num_seen = min(len(proposal.token_ids), len(drawn))
        whole = record.on_the_whole
        whole.learn(num_right, num_seen)
        self._on_the_whole.learn(num_right, num_seen)
        if num_right:
            whole.wait = FIRST_WAIT

    def settle(
        self,
        step: PlainStep,
        num_tried: int,
        num_drawn: Mapping[SequenceId, int],
    ) -> None:
        """Book a step with `num_tried` drafts that gave each sequence so many tokens.

        A token beyond the first stands for a plain step of the sequences that get tokens: prompts
        that share this step would not have shared that one.
        """
        plain = step.plain_seconds
        if plain <= 0:
            return
        later = min(plain, step.next_seconds)
        lost = step.spent_seconds + max(
            0.0, step.seconds(len(step.sequence_ids) + num_tried) - plain
        )
        for sequence_id, count in num_drawn.items():
            record = self._record(sequence_id)
            more = (count - 1) * later
            record.plain_seconds += plain + more
            saved = record.saved_seconds + more - lost
            record.saved_seconds = min(saved, MAX_CREDIT_STEPS * later)
            record.on_the_whole.num_since += count

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence's record."""
        self._records.pop(sequence_id, None)
