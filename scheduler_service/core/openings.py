"""Announcing sequences before their first row, so that it starts after what is cached already.

`openings` names the waiting requests that `plan` would admit now. The shell announces them to the
executor, which looks their prefix up and pins it, and hands the answers to `opened`; `plan` admits
opened requests alone. Opening reserves no blocks, but what it pins cannot be evicted, so few are
opened earlier than that: the first ones that fit, because there may be little left to compute,
and the first in the queue even where all its tokens would not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from scheduler_service.core.batch import SequenceOpened, SequenceOpening
from scheduler_service.core.capacity import BlockBudget, blocks_for
from scheduler_service.core.output_lengths import peak_blocks
from scheduler_service.core.prefix_wait import PrefixLeaders
from scheduler_service.core.request import Request
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import share_step

MAX_LOOKAHEAD: Final = 64
"""Waiting requests that are looked at for one step."""


NUM_EARLY: Final = 4
"""Of these, how many are opened before the step has time for them, to know what is cached."""


def block_budget(state: SchedulerState) -> BlockBudget:
    """Return the blocks that a step's rows may take."""
    limits, counts = state.limits, state.kv_counts
    num_missing = limits.num_blocks - state.block_ceiling
    counted = None
    if counts is not None:
        counted = counts.free + counts.evictable - num_missing
        num_shared = counts.shared * len(state.to_release)
        counted += max(0, state.num_blocks_to_release - num_shared)
    return BlockBudget(
        limits.block_size,
        state.block_ceiling - state.num_blocks_held(),
        counted,
        counts.shared if counts is not None else 0,
    )


class Admissions:
    """Which waiting requests fit, asked in their order.

    The most blocks that all running requests and those admitted are predicted to need at once
    (see `output_lengths`) must fit the pool. Of each request the blocks count that it has not
    got from the prefix cache. A request that runs alone always fits with its known tokens.
    """

    def __init__(
        self,
        state: SchedulerState,
        blocks: BlockBudget,
        running: Iterable[Request] | None = None,
    ) -> None:
        """Start from the running requests, or these of them, and what is left for them."""
        self._block_size = state.limits.block_size
        self._lengths = state.output_lengths
        self._counted = list(state.running.values() if running is None else running)
        self._num_spare = blocks.num_spare
        self._needs: list[tuple[int, int]] | None = None
        self._num_blocks = 0

    def _num_own_blocks(self, request: Request) -> int:
        """Return the blocks that the request computed itself."""
        return blocks_for(request.num_held_tokens, self._block_size) - blocks_for(
            request.num_cached_tokens, self._block_size
        )

    def _need(self, request: Request) -> tuple[int, int]:
        # Blocks that were granted for drafts are held, although their tokens are not known; the
        # token that ends a request is never computed.
        end = request.num_tokens + self._lengths.num_remaining(request) - 1
        length = max(request.num_tokens, request.num_held_tokens)
        return max(0, end - length), length - request.num_cached_tokens

    def admit(self, request: Request) -> bool:
        """Count a waiting request as running and return True, if it fits."""
        if self._needs is None:
            # Most steps ask for nobody.
            self._needs = [self._need(each) for each in self._counted]
            self._num_blocks = self._num_spare + sum(map(self._num_own_blocks, self._counted))
        num_more, length = self._need(request)
        if self._needs:
            needs = [*self._needs, (num_more, length)]
            if peak_blocks(needs, self._block_size) > self._num_blocks:
                return False
        elif blocks_for(length, self._block_size) > self._num_blocks:
            return False
        self._needs.append((num_more, length))
        return True


def openings(state: SchedulerState, now: float) -> tuple[SequenceOpening, ...]:
    """Return the sequences to announce before the next `plan`; empty most of the time.

    Asking again before `opened` was called gives the same sequences, so that they can be
    announced again after a broken session.

    Args:
        state: Changed: requests are marked as announced or as waiting for a prefix.
        now: Monotonic time in seconds; requests whose deadline has passed are not opened.
    """
    num_slots = state.limits.max_num_seqs - len(state.running)
    if num_slots <= 0 or not len(state.waiting) or state.in_flight is not None:
        return ()
    leaders = PrefixLeaders(state)
    candidates = _next(state, min(num_slots, MAX_LOOKAHEAD), leaders, now)
    if all(request.is_opened for request in candidates):
        return ()
    admissions = Admissions(state, block_budget(state))
    found: list[Request] = []
    if admissions.admit(candidates[0]):
        shares = share_step(state, candidates).num_tokens
        # Without a curve, prompts have their tokens in order, whatever is left of them.
        num_early = NUM_EARLY if state.limits.cost_curve else 0
        for index, request in enumerate(candidates):
            if index >= num_early and request.request_id not in shares:
                continue
            if index and not admissions.admit(request):
                break
            if request.is_opened or not leaders.begins_wait(request):
                leaders.add(request)
                found.append(request)
    elif state.may_open_early or not state.running:
        found.append(candidates[0])
    unopened = [request for request in found if not request.is_opened]
    for request in unopened:
        request.is_announced = True
    return tuple(_opening(request) for request in unopened)


def _next(
    state: SchedulerState, num_slots: int, leaders: PrefixLeaders, now: float
) -> list[Request]:
    """Return the first waiting requests that do not wait for a prefix."""
    released = set(state.to_release)
    candidates: list[Request] = []
    for request in islice(state.waiting.ordered(now), num_slots):
        if request.sequence_id in released:
            break
        if request.deadline is not None and request.deadline <= now:
            break
        if request.is_opened or not leaders.keeps_waiting(request):
            candidates.append(request)
            leaders.expect(request)
    return candidates


def opened(state: SchedulerState, answers: Iterable[SequenceOpened]) -> None:
    """Record what the executor has of the announced sequences.

    Answers for requests that have ended or lost that generation since are ignored: their
    sequences are given back with the next batch.
    """
    for answer in answers:
        request = state.requests.get(answer.request_id)
        if (
            request is None
            or not request.is_announced
            or request.is_opened
            or (request.sequence_id, request.generation) != (answer.sequence_id, answer.generation)
        ):
            continue
        request.is_opened = True
        request.num_cached_tokens = answer.num_cached_tokens
        request.num_computed_tokens = answer.num_cached_tokens
        request.provenance_handle = answer.provenance_handle
        if answer.num_cached_tokens or request.num_awaited_tokens:
            # Where waiting was in vain, the executor shares nothing until it is seen to.
            state.shares_prefixes = answer.num_cached_tokens > 0


def _opening(request: Request) -> SequenceOpening:
    return SequenceOpening(
        request_id=request.request_id,
        sequence_id=request.sequence_id,
        generation=request.generation,
        model=request.model,
        cache_salt=request.cache_salt,
        token_ids=request.tokens(0, request.num_tokens),
    )
