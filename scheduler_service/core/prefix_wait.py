"""Requests whose prompt starts like one that is being computed right now.

Computing the common start twice costs a step's rows twice; a request that waits until the other
one has computed it finds it in the prefix cache. So such a request is not opened yet, and those
behind it pass. The wait is short and cannot go on for ever: it is only for an older request that
runs or is before it in the queue, ends as soon as that one has computed the common blocks or is
gone, and ends for good when a step passes in which it ran and made no progress.

Cost: O(1) for each waiting request that is looked at, and one comparison of prompts when a wait
begins.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from scheduler_service.core.request import PrefixWait, Request, RequestStatus
from scheduler_service.core.state import SchedulerState

MIN_SHARED_BLOCKS: Final = 2
"""Fewest blocks that waiting must save: one step more has a price too."""

_MAX_COMPARED: Final = 4

_Key: TypeAlias = tuple[str, str, tuple[int, ...]]


def common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens two prompts have in common at their start."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixLeaders:
    """Requests that compute their prompt in the coming step, by how it starts."""

    def __init__(self, state: SchedulerState) -> None:
        """Start with the running requests that have more than one token to compute."""
        self._state = state
        self._block_size = state.limits.block_size
        self._leaders: dict[_Key, list[Request]] = {}
        self._expected: set[int] = set()
        for request in state.running.values():
            if request.num_uncomputed_tokens > 1 and not request.is_paused:
                self.add(request)

    def add(self, request: Request) -> None:
        """Add a request that runs in the coming step."""
        self.expect(request)
        key = self._key(request)
        if key is not None:
            self._leaders.setdefault(key, []).append(request)

    def expect(self, request: Request) -> None:
        """Add a request that may be about to run, so that waits for it go on."""
        self._expected.add(request.sequence_id)

    def keeps_waiting(self, request: Request) -> bool:
        """Return whether a wait that has begun goes on; otherwise it is over."""
        if request.prefix_wait is not None and not self._goes_on(request, request.prefix_wait):
            request.prefix_wait = None
        return request.prefix_wait is not None

    def begins_wait(self, request: Request) -> bool:
        """Return whether a waiting request had better be opened later."""
        # Of a preempted one, what it computed itself may still be cached.
        is_new = request.status is RequestStatus.WAITING and request.may_wait_for_prefix
        if is_new and self._state.shares_prefixes:
            request.prefix_wait = self._find(request)
        return request.prefix_wait is not None

    def _key(self, request: Request) -> _Key | None:
        length = MIN_SHARED_BLOCKS * self._block_size
        start = request.prompt_token_ids[:length]
        return (request.model, request.cache_salt, start) if len(start) == length else None

    def _goes_on(self, request: Request, wait: PrefixWait) -> bool:
        leader = wait.leader
        if leader.generation != wait.generation:
            return False
        if leader.num_computed_tokens >= wait.num_tokens:
            request.num_awaited_tokens = wait.num_tokens
            return False
        if leader.sequence_id not in self._expected or not self._state.shares_prefixes:
            return False
        if self._state.step_id != wait.step_id:
            has_stood = leader.num_computed_tokens == wait.num_computed_tokens
            if has_stood and leader.status is RequestStatus.RUNNING:
                request.may_wait_for_prefix = False
                return False
            wait.step_id = self._state.step_id
            wait.num_computed_tokens = leader.num_computed_tokens
        return True

    def _find(self, request: Request) -> PrefixWait | None:
        key = self._key(request)
        if key is None:
            return None
        size = self._block_size
        for leader in self._leaders.get(key, ())[:_MAX_COMPARED]:
            if leader.sequence_id > request.sequence_id:
                continue
            # At most all known tokens but the last may come from the cache.
            common = common_length(leader.prompt_token_ids, request.prompt_token_ids)
            num_tokens = min(common, request.num_tokens - 1) // size * size
            if num_tokens - leader.num_computed_tokens >= MIN_SHARED_BLOCKS * size:
                return PrefixWait(
                    leader=leader,
                    generation=leader.generation,
                    num_tokens=num_tokens,
                    num_computed_tokens=leader.num_computed_tokens,
                    step_id=self._state.step_id,
                )
        return None
