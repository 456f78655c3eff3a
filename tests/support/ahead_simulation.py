"""Simulated service of one executor: drafts beside steps that are sent ahead of the answer.

The scheduler's core and speculator are the real ones. Time is that of a cost curve, with noise as
on a shared machine, and chance comes from a seed, so a run is the same everywhere.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_service.core import (
    CostCurve,
    CostPoint,
    Limits,
    Request,
    RequestId,
    SampledRow,
    SamplingParams,
    SchedulerState,
    SequenceId,
    TokenRowBatch,
    apply,
    plan,
    plan_ahead,
    submit,
)
from scheduler_service.speculation import (
    AdaptiveController,
    Proposal,
    ProposerKind,
    Speculator,
    StepSeconds,
)
from tests.support.core_scenarios import open_waiting

# Chance that the draft of an output token is right, by its index; None where nothing is proposed.
Repeats = Callable[[int], float | None]

_RIGHT, _WRONG = 1, 0
_PROMPT = (7, 8, 9)


def stretches(length: int, gap: int, chance: float) -> Repeats:
    """Return a text in which stretches that repeat something follow gaps that do not."""
    return lambda index: chance if index % (length + gap) >= gap else None


class TextProposer:
    """Proposes as the texts of the requests say, which are named by their numbers."""

    kind = ProposerKind.LOOKUP

    def __init__(self, texts: Sequence[Repeats], strength: int) -> None:
        self._texts = texts
        self._strength = strength

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return the drafts that follow, up to the next gap."""
        number, start = int(request.request_id), len(request.output_token_ids)
        drafts: list[int] = []
        for index in range(start, start + max_tokens):
            chance = self._texts[number](index)
            if chance is None:
                break
            is_right = random.Random(number * 100_003 + index).random() < chance
            drafts.append(_RIGHT if is_right else _WRONG)
        return Proposal(tuple(drafts), self._strength if drafts else 0)

    def forget(self, sequence_id: SequenceId) -> None:
        """Have nothing to let go of."""


@dataclass(slots=True)
class AheadSimulation:
    """Requests that generate side by side until each has `num_tokens`."""

    texts: Sequence[Repeats]
    seconds: StepSeconds  # of a step that is not sent ahead
    saving: float = 0.05  # share of a step that one sent ahead saves
    noise: float = 0.1
    num_tokens: int = 400
    strength: int = 8
    seed: int = 0
    num_steps: int = 0
    num_ahead: int = 0
    num_drafted: int = 0
    # By request: when it had all its tokens.
    ends: dict[RequestId, float] = field(default_factory=dict)

    def run(self, *, drafts: bool = True) -> float:
        """Run to the end, with or without drafts; return the time of the last request."""
        limits = Limits(
            max_num_batched_tokens=256, max_num_seqs=64, max_num_waiting=64, block_size=16,
            num_blocks=4096, context_length=4096,
            cost_curve=CostCurve([CostPoint(n, n, 0, self.seconds(n)) for n in range(1, 129)]),
        )  # fmt: skip
        state = SchedulerState(limits)
        for number in range(len(self.texts)):
            submit(
                state,
                Request(
                    RequestId(str(number)), _PROMPT, SamplingParams(), self.num_tokens,
                    cache_salt=str(number),
                ),
            )  # fmt: skip
        open_waiting(state)
        speculator = None
        if drafts:
            proposer = TextProposer(self.texts, self.strength)
            speculator = Speculator(proposer, AdaptiveController(), 8)
        rng = random.Random(self.seed)
        sent: deque[tuple[TokenRowBatch, bool]] = deque()
        now = 0.0
        while state.requests or sent:
            if not sent:
                drafted = speculator.draft(state, goes_ahead=True) if speculator else {}
                batch = plan(state, now, drafted)
                if batch is None:
                    break
                sent.append((batch, False))
            if len(sent) == 1 and not (speculator and speculator.may_draft(state)):
                following = plan_ahead(state, lambda _: True)
                if following is not None:
                    sent.append((following, True))
            batch, is_ahead = sent.popleft()
            if not batch.rows:
                continue
            taken = self.seconds(batch.num_tokens) * (1.0 - self.saving * is_ahead)
            now += taken
            rows = {row.request_id: _sampled(row.draft_token_ids) for row in batch.rows}
            live = set(state.requests)
            apply(state, batch, rows)
            self.ends.update(dict.fromkeys(live - set(state.requests), now))
            if speculator is not None:
                speculator.learn(batch, rows, taken * rng.uniform(1 - self.noise, 1 + self.noise))
            self.num_steps += 1
            self.num_ahead += is_ahead
            self.num_drafted += sum(row.num_draft_tokens for row in batch.rows)
        return now

    def slowdown(self) -> float:
        """Return the time with drafts over that without, of the request that fares worst."""
        self.run(drafts=False)
        plain = dict(self.ends)
        self.num_steps = self.num_ahead = self.num_drafted = 0
        self.run()
        return max(self.ends[each] / plain[each] for each in plain)


def _sampled(drafts: Sequence[int]) -> SampledRow:
    num_right = next((n for n, draft in enumerate(drafts) if draft != _RIGHT), len(drafts))
    return SampledRow(_RIGHT, None, tuple(drafts[:num_right]))
