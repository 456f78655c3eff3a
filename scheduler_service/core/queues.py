"""Who waits, and whose time runs out. Every operation is O(1) or O(log n)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from scheduler_service.core.request import Request, RequestId, SequenceId

_SLACK = 64


class WaitingQueue:
    """Requests without cached state, first come first served.

    A preempted request goes back to the front. As the victim is always the last running one,
    the queue stays ordered by arrival.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def push_back(self, request: Request) -> None:
        """Append a new request."""
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Put a preempted request before all others."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        """Return the first request, or None."""
        return next(iter(self._requests.values()), None)

    def remove(self, request_id: RequestId) -> None:
        """Take a request out, wherever it is."""
        del self._requests[request_id]


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
