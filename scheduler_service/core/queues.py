"""Who waits, in which order, and whose time runs out."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, TypeAlias

from scheduler_service.core.fairness import OUTPUT_WEIGHT, FairShare
from scheduler_service.core.request import (
    Priority,
    Request,
    RequestId,
    RequestStatus,
    SequenceId,
)

_SLACK = 64
# An enum is slow to iterate over.
_PRIORITIES: Final = tuple(Priority)
_OVERDUE: Final = -1

# Of the time in which a request rises: so much earlier its order is made anew.
_EARLY: Final = 1e-6

_Key: TypeAlias = tuple[int, bool, float, SequenceId]


class _Flow:
    """The waiting requests of one client in one class, by arrival."""

    __slots__ = ("client_id", "last_admission", "priority", "requests", "share")

    def __init__(self, client_id: str, priority: int, share: FairShare) -> None:
        self.client_id = client_id
        self.priority = priority
        self.share = share
        self.requests: list[Request] = []
        self.last_admission = float("-inf")


_Head: TypeAlias = tuple[_Key, _Flow, int, Request, "Iterator[Request] | None"]
"""A flow in a heap: its key, tokens before it, its next request and those behind that."""


class _Order:
    """An order of admission, made as far as somebody asks, and kept while it holds.

    Attributes:
        aging_seconds: By which it was made.
        since: Monotonic time for which it was made, in seconds.
        until: Until then nobody of it rises.
    """

    __slots__ = ("_known", "_rest", "aging_seconds", "since", "until")

    def __init__(
        self, rest: Iterator[Request], aging_seconds: float, since: float, until: float
    ) -> None:
        self._rest = rest
        self._known: list[Request] = []
        self.aging_seconds = aging_seconds
        self.since = since
        self.until = until

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a queue makes an order of its own."""

    def __iter__(self) -> Iterator[Request]:
        index = 0
        while True:
            if index == len(self._known):
                following = next(self._rest, None)
                if following is None:
                    return
                self._known.append(following)
            yield self._known[index]
            index += 1


class WaitingQueue:
    """Requests without cached state.

    Order of admission:
    - The requests of one client in one class are a flow; it is served by arrival, and the others
      see only its head.
    - A head is ranked by its class, and rises by one for each `aging_seconds` since it began to
      wait or a request of its flow was last admitted, whichever is later. So nothing starves,
      and a flow of many does not age past others by its mere length.
    - A head that has risen past the highest class goes first; the longest wait decides.
    - Otherwise the rank decides, then that it was preempted, then whose client was served least
      in its class (see `fairness`), then arrival.

    A paused request is passed over. Costs: `push` and `remove` O(flow); `ordered` O(flows), and
    O(log flows) for each request, once until the order changes; nothing more when asked again.
    """

    __slots__ = (
        "_counts",
        "_flows",
        "_order",
        "_requests",
        "_shares",
        "aging_seconds",
        "num_tokens",
    )

    def __init__(self, aging_seconds: float) -> None:
        """Let a head rise by one class each `aging_seconds`."""
        self.aging_seconds = aging_seconds
        # Known tokens of all waiting requests.
        self.num_tokens = 0
        # By class, as plain numbers: an enum's member is slow to hash and to subtract from.
        self._counts = [0] * len(Priority)
        self._shares = [FairShare() for _ in Priority]
        self._flows: dict[tuple[str, int], _Flow] = {}
        self._requests: dict[RequestId, Request] = {}
        self._order: _Order | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they were queued; the queue may change meanwhile."""
        return iter(list(self._requests.values()))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def push(self, request: Request) -> None:
        """Take in a new request or a preempted one, at its place by arrival in its flow."""
        self._order = None
        client_id, priority = request.client_id, int(request.priority)
        flow = self._flows.get((client_id, priority))
        if flow is None:
            share = self._shares[priority]
            share.join(client_id, (f.client_id for f in self._flows.values() if f.share is share))
            flow = self._flows[client_id, priority] = _Flow(client_id, priority, share)
        insort(flow.requests, request, key=_arrival)
        self._requests[request.request_id] = request
        self._counts[priority] += 1
        self.num_tokens += request.num_tokens

    def remove(self, request_id: RequestId) -> None:
        """Take a request out, wherever it is."""
        self._order = None
        request = self._requests.pop(request_id)
        flow = self._flow_of(request)
        del flow.requests[bisect_left(flow.requests, request.sequence_id, key=_arrival)]
        if not flow.requests:
            del self._flows[flow.client_id, flow.priority]
        self._counts[flow.priority] -= 1
        self.num_tokens -= request.num_tokens

    def admit(self, request: Request, now: float) -> None:
        """Take out a request that gets its first row, and count its prompt to its client.

        Sets the request's `rank`; each time it gave way raises it. A preempted one has been
        counted before.
        """
        flow = self._flow_of(request)
        rank = self._key(request, flow.priority, flow.last_admission, 0, now)[0]
        request.rank = max(0, min(rank, flow.priority - request.num_yields))
        flow.last_admission = now
        self.remove(request.request_id)
        if request.status is not RequestStatus.PREEMPTED:
            flow.share.admit(request.client_id, request.num_tokens)

    def charge_output(self, request: Request) -> None:
        """Count a generated token to the request's client."""
        priority = int(request.priority)
        self._shares[priority].charge(request.client_id, OUTPUT_WEIGHT)
        if self._order is not None and (request.client_id, priority) in self._flows:
            self._order = None

    def set_paused(self, request: Request, *, is_paused: bool) -> None:
        """Pause or resume a request, whether it waits or runs."""
        request.is_paused = is_paused
        self._order = None

    def head(self, now: float) -> Request | None:
        """Return the request to admit next, or None."""
        return next(self.ordered(now), None)

    def ordered(self, now: float) -> Iterator[Request]:
        """Iterate in the order of admission, as if each one were admitted at `now`.

        Requests that were yielded may be taken out meanwhile.
        """
        order = self._order
        if (
            order is None
            or not order.since <= now < order.until
            or order.aging_seconds != self.aging_seconds
        ):
            heads, until = self._heads(now)
            rest = self._from(heads, now)
            order = self._order = _Order(rest, self.aging_seconds, now, until)
        return iter(order)

    def ordered_anew(self, now: float) -> Iterator[Request]:
        """Iterate in the same order without what is kept of it, to check that."""
        return self._from(self._heads(now)[0], now)

    def _heads(self, now: float) -> tuple[list[_Head], float]:
        """Return the flows' heads, not in order, and a time until which none of them rises."""
        floors: dict[int, int] = {}
        served_of = []
        for flow in self._flows.values():
            served = flow.share.served(flow.client_id)
            served_of.append(served)
            if served < floors.get(flow.priority, served + 1):
                floors[flow.priority] = served
        heads: list[_Head] = []
        until = math.inf
        for flow, served in zip(self._flows.values(), served_of, strict=True):
            head = flow.requests[0]
            if head.is_paused:
                active = [request for request in flow.requests if not request.is_paused]
                if not active:
                    continue
                head = active[0]
            lead = served - floors[flow.priority]
            key = self._key(head, flow.priority, flow.last_admission, lead, now)
            heads.append((key, flow, lead, head, None))
            if key[0] != _OVERDUE:
                since = max(head.waiting_since, flow.last_admission)
                num_risen = flow.priority - key[0]
                # A little early, whatever a division rounds to.
                until = min(until, since + (num_risen + 1 - _EARLY) * self.aging_seconds)
        return heads, until

    def _from(self, heap: list[_Head], now: float) -> Iterator[Request]:
        heapq.heapify(heap)
        while heap:
            _, flow, lead, request, rest = heap[0]
            if rest is None:
                # Copied before anybody of the flow can have been taken out.
                rest = iter([each for each in flow.requests if not each.is_paused])
                next(rest)
            if request.status is not RequestStatus.PREEMPTED:
                lead += request.num_tokens
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                key = self._key(following, flow.priority, now, lead, now)
                heapq.heapreplace(heap, (key, flow, lead, following, rest))
            yield request

    def highest_priority(self) -> int | None:
        """Return the highest class that somebody is in, or None."""
        return next((number for number, count in enumerate(self._counts) if count), None)

    def num_by_priority(self) -> dict[Priority, int]:
        """Return how many wait in each class."""
        return dict(zip(_PRIORITIES, self._counts, strict=True))

    def _flow_of(self, request: Request) -> _Flow:
        return self._flows[request.client_id, int(request.priority)]

    def _key(
        self, request: Request, priority: int, last_admission: float, lead: int, now: float
    ) -> _Key:
        since = request.waiting_since
        if last_admission > since:
            since = last_admission
        rank = priority
        if now > since:
            rank -= int((now - since) / self.aging_seconds)
        if rank < 0:
            return _OVERDUE, False, since, request.sequence_id
        return rank, request.status is not RequestStatus.PREEMPTED, lead, request.sequence_id


def _arrival(request: Request) -> SequenceId:
    return request.sequence_id


class DeadlineQueue:
    """Deadlines of live requests, the next first.

    Entries of ended requests stay until they are met or until they outnumber the live ones, so
    that ending a request costs nothing here.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, SequenceId, RequestId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request, live: dict[RequestId, Request]) -> None:
        """Add a request that has a deadline; `live` holds all live requests."""
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(live) + _SLACK:
            self._heap = [entry for entry in self._heap if _is_live(entry, live)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.deadline, request.sequence_id, request.request_id))

    def next_deadline(self, live: dict[RequestId, Request]) -> float | None:
        """Return the earliest deadline of a live request in seconds, or None."""
        while self._heap and not _is_live(self._heap[0], live):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, live: dict[RequestId, Request], now: float) -> list[Request]:
        """Take out the live requests whose deadline is `now` or earlier."""
        expired = []
        while (deadline := self.next_deadline(live)) is not None and deadline <= now:
            expired.append(live[heapq.heappop(self._heap)[2]])
        return expired


def _is_live(entry: tuple[float, SequenceId, RequestId], live: dict[RequestId, Request]) -> bool:
    request = live.get(entry[2])
    return request is not None and request.sequence_id == entry[1]
