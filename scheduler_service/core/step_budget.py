"""How the tokens and the time of one step are shared.

Requests with one token to compute go first, so a long prompt never holds the others' streams; one
token is kept for the leader (see `precedence`), so it always advances. What is left goes to
prompts, in chunks. Paused requests have no rows.

Without a cost curve that is all: prompts by class and arrival, then those that wait, in the order
of the queue, as many tokens as the limits allow. With one:
- While somebody decodes, a step may take `step_bound` seconds by the curve, and prompts get what
  fits, one token at least. With nobody decoding, time is not bounded.
- Half of that is for the first prompt: the running one that is served first, or the one that waits
  first where its class is higher. The other half is for those with less left to compute, by class
  and then the shortest first, so that a short prompt does not wait for a long one. What they leave
  is the first one's again, and then that of the others in order.
- Whoever waits may pass others that wait only with a prompt that is computed whole in this step.
  So those that stand before it soon find nobody who runs before them.
- A step does not end at a number of tokens that costs clearly more per token of a prompt than a
  smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from scheduler_service.core.cost_curve import CostCurve
from scheduler_service.core.precedence import leader, service_order
from scheduler_service.core.request import Request, RequestId, RequestStatus
from scheduler_service.core.state import SchedulerState

EFFICIENT_SHARE: Final = 0.95
"""Of the best tokens a second: what the smallest chunk of the derived bound must reach."""

MIN_GAIN: Final = 0.95
"""Of the time per token of a step: what that of a smaller one must be, to be taken instead."""

MIN_GAIN_BESIDE: Final = 0.8
"""The same beside decode rows, where a smaller chunk makes its own request wait for more steps:
a curve has noise, and a kernel path that begins at the next row shows in it by more."""

SINGLE_STEPS: Final = 4.0
"""Steps of one decode row that the derived bound allows at least."""

OWN_STEPS: Final = 2.0
"""Steps of the present decode rows alone that the derived bound allows at least: prompts get half
of the time."""

MAX_OWN_STEPS: Final = 6.0
"""The same at most, however long an efficient chunk takes."""

UNNOTICED_SECONDS: Final = 0.1
"""Up to so long a gap costs a reader nothing: ten tokens a second are about twice what people read,
and a tenth of a second is what they still take for at once (J. Nielsen, Usability Engineering,
1993). The derived bound grows so far while that makes prompts clearly faster."""

FAST_OWN_STEPS: Final = 10.0
"""With steps of so many times what the present decode rows take, prompts are read at nine tenths
of the speed that they would have alone; beyond that a longer step gains next to nothing."""

MIN_OWN_STEPS: Final = 1.1
"""The same for any bound: below that, prompts would stand still beside many decode rows."""


@dataclass(frozen=True, slots=True)
class StepShares:
    """What each request may compute in the coming step, before capacity.

    Attributes:
        num_tokens: Tokens of each request's row; none for those left out.
        bound_seconds: The bound on the step's time by the curve; infinite without one.
    """

    num_tokens: dict[RequestId, int]
    bound_seconds: float = math.inf


@dataclass(slots=True)
class StepLoad:
    """What a step holds so far, and what it costs by the curve."""

    curve: CostCurve
    num_decode_rows: int = 0
    num_positions: int = 0
    num_prompt_tokens: int = 0
    num_prompt_positions: int = 0

    def add_decode(self, request: Request) -> None:
        """Add a row of one token."""
        self.num_decode_rows += 1
        self.num_positions += request.num_computed_tokens

    def add_drafts(self, num_tokens: int, start: int) -> None:
        """Add drafted tokens to a row of one token; fewer than none takes them out again."""
        self.num_decode_rows += num_tokens
        self.num_positions += num_tokens * start

    def add_prompt(self, num_tokens: int, start: int) -> None:
        """Add tokens of a row that starts behind so many cached positions."""
        self.num_prompt_tokens += num_tokens
        self.num_prompt_positions += num_tokens * start

    def seconds(self, num_more: int = 0, start: int = 0) -> float:
        """Return the cost with `num_more` tokens of a row that starts at `start`."""
        return self.curve.step_seconds(
            self.num_decode_rows,
            self.num_decode_rows + self.num_prompt_tokens + num_more,
            self.num_positions,
            self.num_prompt_positions + num_more * start,
        )

    def num_fitting(self, start: int, most: int, seconds: float) -> int:
        """Return how many of `most` tokens of a row at `start` fit in so many seconds."""
        step = (
            self.num_decode_rows,
            self.num_decode_rows + self.num_prompt_tokens,
            self.num_positions,
            self.num_prompt_positions,
        )
        return self.curve.num_fitting(step, start, most, seconds)


def step_bound(state: SchedulerState, load: StepLoad) -> float:
    """Return the most seconds by the curve of a step with the decode rows of `load` and prompts.

    The bound itself is in real time: the one that was set, or the longest of these:
    - A step of the present decode rows with the smallest chunk of a prompt that is about as fast
      per token as any; at least two and at most six steps of these rows alone.
    - Four steps of a single row.
    - Ten steps of the present rows alone, as far as nobody notices.
    By the curve it is longer or shorter, as steps of decode rows and prompts are seen to take less
    or more than the curve says.
    """
    curve, limits, pace = load.curve, state.limits, state.pace
    if not curve or not load.num_decode_rows:
        return math.inf
    num_rows = load.num_decode_rows
    alone = curve.step_seconds(num_rows, num_rows, load.num_positions)
    bound = limits.max_step_seconds
    if bound <= 0:
        chunk = curve.efficient_prompt_tokens(EFFICIENT_SHARE)
        with_chunk = curve.step_seconds(num_rows, num_rows + chunk, load.num_positions)
        own = alone * pace.decode
        bound = min(max(with_chunk * pace.mixed, OWN_STEPS * own), MAX_OWN_STEPS * own)
        bound = max(bound, SINGLE_STEPS * curve.step_seconds(1, 1) * pace.decode)
        bound = max(bound, min(FAST_OWN_STEPS * own, UNNOTICED_SECONDS))
    return max(bound / pace.mixed, MIN_OWN_STEPS * alone)


def share_step(state: SchedulerState, candidates: Sequence[Request]) -> StepShares:
    """Return the shares of the running requests and of waiting candidates, in their order."""
    limits = state.limits
    num_left = limits.max_num_batched_tokens
    load = StepLoad(limits.cost_curve)
    shares: dict[RequestId, int] = {}
    prompts: list[Request] = []
    first = leader(state)
    num_kept = int(first is not None)
    for request in service_order(state):
        if request.num_uncomputed_tokens > 1:
            prompts.append(request)
        elif request is first or num_left > num_kept:
            num_kept = 0 if request is first else num_kept
            shares[request.request_id] = 1
            load.add_decode(request)
            num_left -= 1
    if (not prompts and not candidates) or num_left <= 0:
        return StepShares(shares, step_bound(state, load))
    if not load.curve:
        for request in (*prompts, *candidates):
            num_kept = 0 if request is first else num_kept
            most = min(request.num_uncomputed_tokens, limits.max_prefill_chunk)
            num_new = min(most, num_left - num_kept)
            if num_new > 0:
                shares[request.request_id] = num_new
                num_left -= num_new
        return StepShares(shares)
    sharing = _Sharing(load, step_bound(state, load), num_left, limits.max_prefill_chunk)
    sharing.run(prompts, candidates, first if num_kept else None)
    return StepShares(shares | sharing.shares, sharing.bound)


@dataclass(slots=True)
class _Sharing:
    """Prompts' shares of a step by the curve."""

    load: StepLoad
    bound: float
    num_left: int
    chunk: int
    shares: dict[RequestId, int] = field(default_factory=dict)

    def run(
        self, prompts: Sequence[Request], candidates: Sequence[Request], kept: Request | None
    ) -> None:
        """Share among running prompts and waiting candidates; `kept` gets a token at least."""
        first = prompts[0] if prompts else candidates[0]
        if prompts and candidates and candidates[0].priority < prompts[0].rank:
            first = candidates[0]
        alone = self.load.seconds()
        if kept is not None:
            self._add(kept, 1)
        others = [each for each in (*prompts, *candidates) if each is not first]
        behind = set(map(id, candidates[1:]))
        length = first.num_uncomputed_tokens
        shorter = [each for each in others if each.num_uncomputed_tokens < length]
        shorter.sort(key=_by_class_and_length)
        if shorter:
            half = alone + (self.bound - alone) / 2
            self._take(first, max(1, self.num_left // 2), half)
        if not self.shares:
            self._take(first, self.num_left, self.bound)
        if not self.shares:
            self._add(first, 1)
        too_long = math.inf
        for request in (*shorter, first, *others):
            if id(request) not in behind:
                if not self._take(request, self.num_left, self.bound):
                    break
            elif request.num_uncomputed_tokens < too_long and not self._take_whole(request):
                too_long = request.num_uncomputed_tokens
        self._trim(first, alone)

    def _take(self, request: Request, most: int, seconds: float) -> bool:
        """Give a request more tokens, as many as fit in `most` and in a step of so many seconds.

        Returns False when time was too short.
        """
        taken = self.shares.get(request.request_id, 0)
        missing = request.num_uncomputed_tokens - taken
        most = min(missing, self.chunk - taken, self.num_left, most)
        if most <= 0:
            return True
        num_new = self.load.num_fitting(request.num_computed_tokens, most, seconds)
        if num_new:
            self._add(request, num_new)
        return num_new == most

    def _take_whole(self, request: Request) -> bool:
        """Give a request that has no tokens yet all of them; return whether they fit."""
        if request.request_id in self.shares:
            return True
        num_tokens, start = request.num_uncomputed_tokens, request.num_computed_tokens
        if num_tokens > min(self.chunk, self.num_left):
            return False
        if self.load.seconds(num_tokens, start) > self.bound:
            return False
        self._add(request, num_tokens)
        return True

    def _add(self, request: Request, num_tokens: int) -> None:
        taken = self.shares.get(request.request_id, 0)
        self.shares[request.request_id] = taken + num_tokens
        self.num_left -= num_tokens
        self.load.add_prompt(num_tokens, request.num_computed_tokens)

    def _trim(self, first: Request, alone: float) -> None:
        """Cut the first one's chunk where prompts take less time a token in a smaller step.

        That is the time that they add to the decode rows, which take theirs anyway. A last chunk
        is left alone: cutting it would cost a step more.
        """
        taken = self.shares.get(first.request_id, 0)
        if taken == first.num_uncomputed_tokens:
            return
        load, start = self.load, first.num_computed_tokens
        num_prompt, num_decode = load.num_prompt_tokens, load.num_decode_rows
        min_gain = MIN_GAIN_BESIDE if num_decode else MIN_GAIN
        now = (load.seconds() - alone) / num_prompt
        costs = {
            cut: (load.seconds(-cut, start) - alone) / (num_prompt - cut)
            for size in load.curve.prompt_sizes
            if 0 < (cut := num_decode + num_prompt - size) < taken
        }
        least = min(costs.values(), default=now)
        if least < now * min_gain:
            # Of those about as good, the largest step.
            self._add(first, -min(cut for cut, cost in costs.items() if cost <= least / MIN_GAIN))


def _by_class_and_length(request: Request) -> tuple[int, int]:
    is_running = request.status is RequestStatus.RUNNING
    return request.rank if is_running else request.priority, request.num_uncomputed_tokens
