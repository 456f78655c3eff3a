"""Preemption in favour of the request that waits first.

Where it finds no slot or no memory it may take them from paused requests of any class, and from
running ones whose rank is below its own class. Ageing gives no such right: an aged request is
merely next. Nothing is preempted unless it lets the request in, and only as much as that takes.

Each time a request gave way it runs one class higher when it comes back, so it gives way at most
twice: the work that is lost is bounded and nobody starves by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.events import PreemptionReason, RequestPreempted
from scheduler_service.core.lifecycle import preempt
from scheduler_service.core.openings import Admissions, block_budget
from scheduler_service.core.precedence import by_worth
from scheduler_service.core.request import Request
from scheduler_service.core.state import SchedulerState


def give_way(state: SchedulerState, now: float) -> list[RequestPreempted]:
    """Preempt what the request that waits first may take the place of, if that lets it in.

    It is opened and admitted with the next step, when the blocks are free.
    """
    highest = state.waiting.highest_priority()
    if highest is None or not _may_preempt(state.running.values(), highest):
        return []
    head = state.waiting.head(now)
    if head is None or not _may_preempt(state.running.values(), head.priority):
        return []
    left = by_worth(state.running.values())
    if _fits(state, left, (), head):
        return []
    victims: list[Request] = []
    for request in reversed(left.copy()):
        if not _may_preempt((request,), head.priority):
            continue
        victims.append(request)
        left.remove(request)
        if _fits(state, left, victims, head):
            break
    else:
        return []
    for request in victims[:-1]:
        # A later, larger one may have made it unnecessary.
        others = [other for other in victims if other is not request]
        if _fits(state, [*left, request], others, head):
            left.append(request)
            victims = others
    return [_preempt(state, request) for request in victims]


def _fits(
    state: SchedulerState, left: list[Request], victims: Iterable[Request], head: Request
) -> bool:
    """Return whether a request has a slot and memory beside those that are left running.

    Alone it has always, as `submit` refuses what the pool cannot hold.
    """
    if not left:
        return True
    if len(left) >= state.limits.max_num_seqs:
        return False
    blocks = block_budget(state)
    for victim in victims:
        blocks.give_back(victim.num_held_tokens)
    return Admissions(state, blocks, left).admit(head)


def _may_preempt(running: Iterable[Request], priority: int) -> bool:
    """Return whether any of these may have to give way to a request of that class."""
    return any(request.rank > priority or request.is_paused for request in running)


def _preempt(state: SchedulerState, request: Request) -> RequestPreempted:
    if request.is_paused:
        return preempt(state, request, PreemptionReason.PAUSED)
    request.num_yields += 1
    return preempt(state, request, PreemptionReason.PRIORITY)
