"""Simulated speculation: sequences whose drafts are right as often as a kind of text says.

Time is that of a cost curve and chance comes from a seed, so a run is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_service.core import SequenceId
from scheduler_service.speculation import Controller, PlainStep, Proposal, StepSeconds

# Chance that the next draft is right, by the index of the output token.
Text = Callable[[int], float]


def curve(first: float, each: float, jump: float = 0.0, jump_at: int = 2) -> StepSeconds:
    """Return the seconds of n tokens: `first + each * (n - 1)`, and `jump` more from `jump_at`."""
    return lambda n: first + each * (n - 1) + (jump if n >= jump_at else 0.0)


@dataclass(slots=True)
class Simulation:
    """Sequences that generate side by side until each has `num_tokens`."""

    texts: Sequence[Text]
    num_tokens: int
    seconds: StepSeconds
    controller: Controller
    max_drafts: int = 8
    # What every sequence's proposals claim for themselves.
    strength: int = 8
    seed: int = 0
    # By sequence: tokens so far, and the time at which it had them all.
    lengths: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    plain_ends: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_steps: int = 0

    def run(self) -> Simulation:
        """Run to the end."""
        count = len(self.texts)
        self.lengths, self.ends, self.plain_ends = [0] * count, [0.0] * count, [0.0] * count
        rng = random.Random(self.seed)
        now = 0.0
        while live := [i for i in range(count) if self.lengths[i] < self.num_tokens]:
            ids = [SequenceId(i) for i in live]
            step = PlainStep(ids, self.max_drafts * len(ids), self.seconds, self.seconds(len(ids)))
            # Token 1 is always what comes; a wrong draft is token 0.
            proposals = {SequenceId(i): self._proposal(i, rng) for i in live}
            chosen = self.controller.choose(step, proposals)
            num_tried = sum(chosen.values())
            now += self.seconds(len(ids) + num_tried)
            drawn: dict[SequenceId, int] = {}
            for each, proposal in proposals.items():
                tried = proposal.token_ids[: chosen.get(each, 0)]
                num_right = next((n for n, draft in enumerate(tried) if not draft), len(tried))
                drawn[each] = min(num_right + 1, self.num_tokens - self.lengths[each])
                self.controller.learn(each, proposal, (1,) * drawn[each])
                for _ in range(drawn[each]):
                    self.plain_ends[each] += self.seconds(len(ids))
                self.lengths[each] += drawn[each]
                if self.lengths[each] >= self.num_tokens:
                    self.ends[each] = now
            self.controller.settle(step, num_tried, drawn)
            self.num_drafted += num_tried
            self.num_steps += 1
        return self

    def _proposal(self, index: int, rng: random.Random) -> Proposal:
        start = self.lengths[index]
        text = self.texts[index]
        drafts = tuple(int(rng.random() < text(start + i)) for i in range(self.max_drafts))
        return Proposal(drafts, self.strength)

    def slowdowns(self) -> list[float]:
        """Return for each sequence its time over what its tokens take without any drafts."""
        return [end / plain for end, plain in zip(self.ends, self.plain_ends, strict=True)]
