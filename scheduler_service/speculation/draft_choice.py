"""For whom the draft model is asked, and for how many tokens.

Asking costs time whatever comes of it, so it is decided before: by how often drafts of the sequence
have been right on the whole, what the passes and the way to the executor cost, and what the rows
that verify them will. The most expected tokens a second win, and no accounts may be overdrawn: at
worst everything is drafted, verified and wrong.

The draft model stops where it is not sure, so a good stretch gets long drafts and a bad one short
ones. A sequence whose drafts have not paid is tried again after a while, each time after longer,
with a single token and only as its account allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from scheduler_service.core.request import SequenceId
from scheduler_service.speculation.costs import StepSeconds
from scheduler_service.speculation.draft_costs import DraftCosts

MIN_THRESHOLD: Final = 0.15
MAX_THRESHOLD: Final = 0.9
FIRST_WAIT: Final = 16
LAST_WAIT: Final = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that the draft model can be asked for.

    Attributes:
        max_drafts: Most drafts that can be of use, at least 1.
        num_missing: Known tokens that the draft model has yet to compute, at least 1.
    """

    max_drafts: int
    num_missing: int


@dataclass(frozen=True, slots=True)
class Asking:
    """What to ask of the draft model.

    Attributes:
        num_drafts: Most drafts by sequence.
        min_confidence: Where drafting ends.
    """

    num_drafts: Mapping[SequenceId, int] = field(default_factory=dict)
    min_confidence: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.num_drafts)


NOTHING: Final = Asking()


@dataclass(slots=True)
class DraftRecord:
    """How a sequence's drafts by the draft model have fared."""

    share: float
    weight: float = 4.0
    # Tokens since it was last drafted for, and after how many it is tried again.
    num_since: int = 0
    wait: int = FIRST_WAIT

    def learn(self, num_right: int, num_drafts: int) -> None:
        """Count a proposal: so many were right, of those that a token came in place of."""
        num_seen = min(num_right + 1, num_drafts)
        self.weight = self.weight * 0.95
        total = self.weight + num_seen
        self.share = (self.share * self.weight + num_right) / total
        self.weight = total
        self.num_since = 0

    def is_due(self) -> bool:
        """Return whether it is time to try again."""
        return self.num_since >= self.wait


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The coming step, to choose for.

    Attributes:
        num_plain: Sequences that get a token.
        num_room: Drafts that the limits of a step leave room for.
        seconds: Cost of the step by its rows of logits.
        spendable: Seconds by which all accounts allow the plain step to be exceeded.
        ahead_seconds: What a step without drafts saves by being sent ahead.
    """

    num_plain: int
    num_room: int
    seconds: StepSeconds
    spendable: float
    ahead_seconds: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """Cost without drafts."""
        return self.seconds(self.num_plain) - self.ahead_seconds

    def threshold(self, num_rows: int, costs: DraftCosts) -> float:
        """Return the chance at which one more draft pays for its pass and its row."""
        plain = self.plain_seconds
        row = self.seconds(self.num_plain + 1) - self.seconds(self.num_plain)
        price = (row + costs.pass_seconds(num_rows) / num_rows) * self.num_plain / plain
        return min(max(price, MIN_THRESHOLD), MAX_THRESHOLD)


def choose(
    step: DraftStep,
    candidates: Mapping[SequenceId, Candidate],
    records: Mapping[SequenceId, DraftRecord],
    costs: DraftCosts,
    min_gain: float,
    accounts: Mapping[SequenceId, float] = MappingProxyType({}),
    *,
    is_trial: bool = False,
) -> Asking:
    """Return what to ask before a step, or NOTHING.

    Args:
        step: The step.
        candidates: Sequences that can be drafted for.
        records: How their drafts have fared.
        costs: Of the draft model.
        min_gain: Tokens a second that drafts must promise, over none.
        accounts: What stands on the sequences' accounts, in seconds.
        is_trial: Whether records stay as they are.
    """
    ready = sorted(candidates, key=lambda each: -records[each].share)
    if step.spendable < step.plain_seconds:
        # Who has the least on its account earns first, or it would hold the others for long.
        ready = [each for each in ready if records[each].share >= MIN_THRESHOLD]
        ready.sort(key=lambda each: accounts.get(each, 0.0))
    best: Asking = NOTHING
    best_rate = min_gain * step.num_plain / step.plain_seconds
    for count in range(1, len(ready) + 1):
        if records[ready[count - 1]].share < MIN_THRESHOLD:
            break
        some = ready[:count]
        threshold = step.threshold(count, costs)
        depth = _depth(step, [candidates[each] for each in some], costs)
        if depth < 1:
            break
        rate = _rate(step, [records[each].share for each in some], depth, threshold, costs)
        if rate > best_rate:
            best_rate = rate
            most = {each: min(depth, candidates[each].max_drafts) for each in some}
            best = Asking(most, threshold)
    return best or _probe(step, candidates, records, costs, is_trial=is_trial)


def _depth(step: DraftStep, some: Sequence[Candidate], costs: DraftCosts) -> int:
    """Return how many drafts each may have so that the worst is within the accounts."""
    left = step.spendable - costs.overhead_seconds
    left -= costs.catch_up_seconds(sum(each.num_missing for each in some))
    deepest = max(each.max_drafts for each in some)
    depth = num_rows = 0
    while depth < deepest:
        rows = sum(each.max_drafts > depth for each in some)
        if depth:
            left -= costs.pass_seconds(rows)
        num_rows += rows
        if num_rows > step.num_room:
            break
        if left < step.seconds(step.num_plain + num_rows) - step.plain_seconds:
            break
        depth += 1
    return depth


def _rate(
    step: DraftStep, shares: Sequence[float], depth: int, threshold: float, costs: DraftCosts
) -> float:
    """Return the expected tokens a second when all of these are asked for, to this depth."""
    num_tokens, num_rows = float(step.num_plain), 0.0
    seconds = costs.overhead_seconds
    chances = [1.0] * len(shares)
    going = len(shares)
    for index in range(depth):
        if not going:
            break
        seconds += costs.pass_seconds(max(1, round(going)))
        right = [chance * share for chance, share in zip(chances, shares, strict=True)]
        num_tokens += sum(right)
        num_rows += sum(chances) if index else len(chances)
        chances = [chance if chance >= threshold else 0.0 for chance in right]
        going = sum(chance > 0 for chance in chances)
    return num_tokens / (seconds + step.seconds(step.num_plain + math.ceil(num_rows)))


def _probe(
    step: DraftStep,
    candidates: Mapping[SequenceId, Candidate],
    records: Mapping[SequenceId, DraftRecord],
    costs: DraftCosts,
    *,
    is_trial: bool,
) -> Asking:
    """Return a single token for each of those that were not asked for in a long while."""
    due = [each for each in candidates if records[each].is_due()]
    if not due or _depth(step, [Candidate(1, candidates[each].num_missing) for each in due],
                         costs) < 1:  # fmt: skip
        return NOTHING
    for each in () if is_trial else due:
        record = records[each]
        record.num_since, record.wait = 0, min(2 * record.wait, LAST_WAIT)
    return Asking(dict.fromkeys(due, 1))
