"""Orders of the running requests: who gets tokens first, and who keeps its cached state.

Both put one request before all others, the *leader*: the oldest running one that is not paused.
It gets a token in every step and is never preempted for another's growth. That is why the
scheduler cannot stand still or go round in circles: whatever else is preempted and recomputed,
the leader advances until it ends; another becomes the leader only by being older, and of those
there are finitely many. Preemption for a higher class may take the leader too, but a request
gives way at most twice (see `victims`).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from scheduler_service.core.request import Request, SequenceId
from scheduler_service.core.state import SchedulerState

# Both orders are made in every step; these getters cost half of what a function does.
_ARRIVAL: Final = attrgetter("sequence_id")
_CLASS_AND_ARRIVAL: Final = attrgetter("rank", "sequence_id")


def leader(state: SchedulerState) -> Request | None:
    """Return the oldest running request that is not paused, or None."""
    active = (request for request in state.running.values() if not request.is_paused)
    return min(active, key=_ARRIVAL, default=None)


def service_order(state: SchedulerState) -> list[Request]:
    """Return the running requests that may have rows: by class, then by arrival."""
    active = [request for request in state.running.values() if not request.is_paused]
    active.sort(key=_CLASS_AND_ARRIVAL)
    return active


def by_worth(requests: Iterable[Request]) -> list[Request]:
    """Return requests by class, then by how much work would be lost; paused ones come last."""
    return sorted(requests, key=_worth)


def keep_order(state: SchedulerState) -> list[Request]:
    """Return all running requests: the leader, then the others by their worth.

    The last is the first to be preempted where another one has to grow.
    """
    order = by_worth(state.running.values())
    first = leader(state)
    if first is not None:
        order.remove(first)
        order.insert(0, first)
    return order


def _worth(request: Request) -> tuple[bool, int, int, SequenceId]:
    # Lost are the tokens that it computed itself; what came from the prefix cache is taken to be
    # found there again.
    num_lost_tokens = max(0, request.num_computed_tokens - request.num_cached_tokens)
    return request.is_paused, request.rank, -num_lost_tokens, request.sequence_id
