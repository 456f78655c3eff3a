"""Simulated speculation with a draft model: its own cost, its confidence, texts of any kind.

Time is that of cost curves and chance comes from a seed, so a run is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_service.core import CostCurve, CostPoint, SequenceId
from scheduler_service.speculation import (
    Controller,
    PlainStep,
    Proposal,
    ProposerKind,
    StepSeconds,
)
from scheduler_service.speculation.draft_choice import Candidate
from scheduler_service.speculation.draft_costs import DraftCosts
from scheduler_service.speculation.draft_model import WINDOW

# Chance that the next draft is right, by the index of the output token.
Text = Callable[[int], float]


def draft_curve(first: float, each: float, token: float) -> CostCurve:
    """Return a curve of passes by rows; a `token` of a prompt costs less than a row."""
    rows = (1, 2, 4, 8, 16, 32)
    points = [CostPoint(n, n, 0, first + each * (n - 1)) for n in rows]
    points += [CostPoint(1, n, 0, first + token * (n - 1)) for n in (16, 64, 256)]
    return CostCurve(points)


@dataclass(slots=True)
class DraftSimulation:
    """Sequences that generate side by side until each has `num_tokens`."""

    texts: Sequence[Text]
    num_tokens: int
    seconds: StepSeconds
    curve: CostCurve
    controller: Controller
    overhead: float = 0.0005
    num_prompt_tokens: int = 100
    max_drafts: int = 8
    seed: int = 0
    lengths: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    plain_ends: list[float] = field(default_factory=list)
    num_asked: int = 0
    num_steps: int = 0

    def run(self) -> DraftSimulation:
        """Run to the end."""
        count = len(self.texts)
        self.lengths, self.ends, self.plain_ends = [0] * count, [0.0] * count, [0.0] * count
        missing = [self.num_prompt_tokens + 1] * count
        costs = DraftCosts(self.curve)
        rng = random.Random(self.seed)
        now = 0.0
        while live := [i for i in range(count) if self.lengths[i] < self.num_tokens]:
            ids = [SequenceId(i) for i in live]
            room = self.max_drafts * len(ids)
            plain = self.seconds(len(ids))
            step = PlainStep(ids, room, self.seconds, plain)
            left = {i: self.num_tokens - self.lengths[i] - 1 for i in live}
            asking = self.controller.ask(
                step,
                {SequenceId(i): Candidate(min(self.max_drafts, left[i]), min(WINDOW, missing[i]))
                 for i in live if left[i] > 0},
                costs,
            )  # fmt: skip
            spent, proposals = 0.0, {}
            if asking:
                self.num_asked += 1
                num_tokens = sum(min(WINDOW, missing[each]) for each in asking.num_drafts)
                spent = self.overhead + self.curve.step_seconds(1, num_tokens)
                for each, most in asking.num_drafts.items():
                    proposals[each] = self._proposal(each, most, asking.min_confidence, rng)
                    missing[each] = 0
                depth = max((len(each.token_ids) for each in proposals.values()), default=0)
                for index in range(1, depth):
                    rows = sum(len(each.token_ids) > index for each in proposals.values())
                    spent += self.curve.step_seconds(rows, rows)
                costs.observe(spent - self.overhead, spent - self.overhead, spent)
            step = PlainStep(ids, room, self.seconds, plain, spent)
            chosen = self.controller.choose(step, proposals) if proposals else {}
            num_tried = sum(chosen.values())
            now += spent + self.seconds(len(ids) + num_tried)
            drawn: dict[SequenceId, int] = {}
            for each in ids:
                made = proposals[each].token_ids if each in proposals else ()
                tried = made[: chosen.get(each, 0)]
                right = next((n for n, draft in enumerate(tried) if not draft), len(tried))
                drawn[each] = min(right + 1, self.num_tokens - self.lengths[each])
                if each in proposals:
                    self.controller.learn(each, proposals[each], (1,) * drawn[each])
                self.plain_ends[each] += plain * drawn[each]
                self.lengths[each] += drawn[each]
                # The last drafted token was not computed.
                missing[each] += drawn[each] - min(right, max(0, len(made) - 1))
                if self.lengths[each] >= self.num_tokens:
                    self.ends[each] = now
            self.controller.settle(step, num_tried, drawn)
            self.num_steps += 1
        return self

    def _proposal(self, index: int, most: int, least: float, rng: random.Random) -> Proposal:
        drafts: list[int] = []
        confidences: list[float] = []
        product = 1.0
        while len(drafts) < most and product >= least:
            chance = self.texts[index](self.lengths[index] + len(drafts))
            # Now surer and now less sure than the text is on the whole.
            confidence = min(0.99, max(0.01, chance + rng.uniform(-0.3, 0.3)))
            drafts.append(int(rng.random() < confidence))
            confidences.append(confidence)
            product *= confidence
        return Proposal(tuple(drafts), 0, ProposerKind.DRAFT, tuple(confidences))

    def slowdowns(self) -> list[float]:
        """Return for each sequence its time over what its tokens take without any drafts."""
        return [end / plain for end, plain in zip(self.ends, self.plain_ends, strict=True)]
