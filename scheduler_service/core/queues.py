"""Who waits, in which order, and whose time runs out."""

from __future__ import annotations

import heapq
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
_OVERDUE: Final = -1

_Key: TypeAlias = tuple[int, bool, float, SequenceId]


class _Flow:
    """The waiting requests of one client in one class, by arrival."""

    __slots__ = ("client_id", "last_admission", "priority", "requests")

    def __init__(self, client_id: str, priority: Priority) -> None:
        self.client_id = client_id
        self.priority = priority
        self.requests: list[Request] = []
        self.last_admission = float("-inf")


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

    A paused request is passed over. Costs: `push` and `remove` O(flow), `ordered` O(waiting).
    """

    __slots__ = ("_flows", "_requests", "_shares", "aging_seconds", "num_tokens")

    def __init__(self, aging_seconds: float) -> None:
        """Let a head rise by one class each `aging_seconds`."""
        self.aging_seconds = aging_seconds
        # Known tokens of all waiting requests.
        self.num_tokens = 0
        self._flows: dict[tuple[str, Priority], _Flow] = {}
        self._requests: dict[RequestId, Request] = {}
        self._shares = {priority: FairShare() for priority in Priority}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they were queued; the queue may change meanwhile."""
        return iter(list(self._requests.values()))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def push(self, request: Request) -> None:
        """Take in a new request or a preempted one, at its place by arrival in its flow."""
        key = (request.client_id, request.priority)
        flow = self._flows.get(key)
        if flow is None:
            others = [each.client_id for each in self._of_class(request.priority)]
            self._shares[request.priority].join(request.client_id, others)
            flow = self._flows[key] = _Flow(*key)
        insort(flow.requests, request, key=_arrival)
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def remove(self, request_id: RequestId) -> None:
        """Take a request out, wherever it is."""
        request = self._requests.pop(request_id)
        key = (request.client_id, request.priority)
        flow = self._flows[key]
        del flow.requests[bisect_left(flow.requests, request.sequence_id, key=_arrival)]
        if not flow.requests:
            del self._flows[key]
        self.num_tokens -= request.num_tokens

    def admit(self, request: Request, now: float) -> None:
        """Take out a request that gets its first row, and count its prompt to its client.

        Sets the request's `rank`; each time it gave way raises it. A preempted one has been
        counted before.
        """
        flow = self._flows[request.client_id, request.priority]
        rank = self._rank(request, flow.last_admission, now)
        request.rank = max(0, min(rank, request.priority - request.num_yields))
        flow.last_admission = now
        self.remove(request.request_id)
        if request.status is not RequestStatus.PREEMPTED:
            self._shares[request.priority].admit(request.client_id, request.num_tokens)

    def charge_output(self, request: Request) -> None:
        """Count a generated token to the request's client."""
        self._shares[request.priority].charge(request.client_id, OUTPUT_WEIGHT)

    def head(self, now: float) -> Request | None:
        """Return the request to admit next, or None."""
        return next(self.ordered(now), None)

    def ordered(self, now: float) -> Iterator[Request]:
        """Iterate in the order of admission, as if each one were admitted at `now`.

        The queue may change meanwhile; the iteration goes on as it began.
        """
        floors: dict[Priority, int] = {}
        for flow in self._flows.values():
            served = self._shares[flow.priority].served(flow.client_id)
            floors[flow.priority] = min(floors.get(flow.priority, served), served)
        heap: list[tuple[_Key, list[Request], int, int]] = []
        for flow in self._flows.values():
            waiting = [each for each in flow.requests if not each.is_paused]
            if waiting:
                lead = self._shares[flow.priority].served(flow.client_id) - floors[flow.priority]
                key = self._key(waiting[0], flow.last_admission, lead, now)
                heap.append((key, waiting, 0, lead))
        heapq.heapify(heap)
        while heap:
            _, waiting, index, lead = heap[0]
            request = waiting[index]
            if request.status is not RequestStatus.PREEMPTED:
                lead += request.num_tokens
            index += 1
            if index < len(waiting):
                key = self._key(waiting[index], now, lead, now)
                heapq.heapreplace(heap, (key, waiting, index, lead))
            else:
                heapq.heappop(heap)
            yield request

    def num_by_priority(self) -> dict[Priority, int]:
        """Return how many wait in each class."""
        counts = dict.fromkeys(Priority, 0)
        for flow in self._flows.values():
            counts[flow.priority] += len(flow.requests)
        return counts

    def _of_class(self, priority: Priority) -> Iterator[_Flow]:
        return (flow for flow in self._flows.values() if flow.priority is priority)

    def _rank(self, request: Request, last_admission: float, now: float) -> int:
        waited = max(0.0, now - max(request.waiting_since, last_admission))
        return max(_OVERDUE, request.priority - int(waited / self.aging_seconds))

    def _key(self, request: Request, last_admission: float, lead: int, now: float) -> _Key:
        rank = self._rank(request, last_admission, now)
        if rank == _OVERDUE:
            since = max(request.waiting_since, last_admission)
            return rank, False, since, request.sequence_id
        is_new = request.status is not RequestStatus.PREEMPTED
        return rank, is_new, float(lead), request.sequence_id


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
