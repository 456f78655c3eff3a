"""The waiting queue keeps order; the deadline queue forgets ended requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core import RequestId, SequenceId
from scheduler_service.core.queues import DeadlineQueue, WaitingQueue
from tests.support.core_scenarios import make_request

if TYPE_CHECKING:
    from scheduler_service.core import Request


def _names(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_first_come_first_served_with_preempted_ones_in_front() -> None:
    """New requests go to the back, preempted ones to the front."""
    queue = WaitingQueue()
    queue.push_back(make_request("b"))
    queue.push_back(make_request("c"))
    queue.push_front(make_request("a"))
    assert _names(queue) == ["a", "b", "c"]
    head = queue.head()
    assert head is not None
    assert head.request_id == "a"
    assert len(queue) == 3


def test_removal_from_the_middle() -> None:
    """A cancelled request leaves from wherever it is."""
    queue = WaitingQueue()
    for name in "abc":
        queue.push_back(make_request(name))
    queue.remove(RequestId("b"))
    assert _names(queue) == ["a", "c"]
    assert RequestId("b") not in queue
    assert RequestId("c") in queue


def test_an_empty_queue_has_no_head() -> None:
    """No head, no length."""
    queue = WaitingQueue()
    assert queue.head() is None
    assert len(queue) == 0


def _live(*requests: Request) -> dict[RequestId, Request]:
    for number, request in enumerate(requests, start=1):
        request.sequence_id = SequenceId(number)
    return {request.request_id: request for request in requests}


def test_deadlines_come_out_in_order_and_only_when_met() -> None:
    """A deadline equal to now is met; a later one is not."""
    a, b, c = (make_request(n, deadline=d) for n, d in (("a", 3.0), ("b", 1.0), ("c", 2.0)))
    live = _live(a, b, c)
    queue = DeadlineQueue()
    for request in (a, b, c):
        queue.push(request, live)
    assert queue.next_deadline(live) == 1.0
    assert queue.pop_expired(live, 0.999) == []
    assert queue.pop_expired(live, 2.0) == [b, c]
    assert queue.next_deadline(live) == 3.0


def test_a_request_without_deadline_is_never_held() -> None:
    """None means never."""
    request = make_request("a")
    live = _live(request)
    queue = DeadlineQueue()
    queue.push(request, live)
    assert len(queue) == 0
    assert queue.next_deadline(live) is None


def test_ended_requests_do_not_expire_even_when_their_id_is_used_again() -> None:
    """The sequence id tells a new request from an old one of the same name."""
    old = make_request("a", deadline=1.0)
    queue = DeadlineQueue()
    queue.push(old, _live(old))
    new = make_request("a", deadline=5.0)
    new.sequence_id = SequenceId(2)
    live = {new.request_id: new}
    queue.push(new, live)
    assert queue.pop_expired(live, 2.0) == []
    assert queue.next_deadline(live) == 5.0


def test_entries_of_ended_requests_stay_bounded() -> None:
    """Far deadlines of requests that ended long ago do not pile up."""
    queue = DeadlineQueue()
    for number in range(1000):
        request = make_request(str(number), deadline=1e9)
        request.sequence_id = SequenceId(number)
        queue.push(request, {request.request_id: request})
    assert len(queue) < 100
