"""The waiting queue keeps order; the deadline queue forgets ended requests."""

from __future__ import annotations

import random
from copy import deepcopy

from scheduler_service.core import Priority, Request, RequestId, RequestStatus, SequenceId
from scheduler_service.core.fairness import MAX_CLIENTS
from scheduler_service.core.queues import DeadlineQueue, WaitingQueue
from tests.support.core_scenarios import make_request

I, N, B = Priority.INTERACTIVE, Priority.NORMAL, Priority.BATCH  # noqa: E741


def _queue(*requests: Request, aging_seconds: float = 10.0) -> WaitingQueue:
    """Return a queue of these requests, numbered in order."""
    queue = WaitingQueue(aging_seconds)
    for number, request in enumerate(requests, start=1):
        request.sequence_id = SequenceId(number)
        request.waiting_since = request.arrival
        queue.push(request)
    return queue


def _order(queue: WaitingQueue, now: float = 0.0) -> str:
    """Return the names in the order of admission, which is checked against real admissions."""
    said = [request.request_id for request in queue.ordered(now)]
    copy = deepcopy(queue)
    done = []
    while (head := copy.head(now)) is not None:
        copy.admit(head, now)
        done.append(head.request_id)
    assert done == said
    return "".join(said)


def test_one_client_is_served_by_arrival_whatever_order_it_was_queued_in() -> None:
    """A preempted request goes back to its place."""
    a, b, c = (make_request(name) for name in "abc")
    queue = _queue(a, b, c)
    queue.remove(a.request_id)
    queue.remove(b.request_id)
    queue.push(b)
    queue.push(a)
    assert _order(queue) == "abc"
    assert len(queue) == 3
    assert RequestId("b") in queue


def test_removal_from_the_middle() -> None:
    """A cancelled request leaves from wherever it is, with its tokens."""
    queue = _queue(*(make_request(name, 5) for name in "abc"))
    queue.remove(RequestId("b"))
    assert _order(queue) == "ac"
    assert RequestId("b") not in queue
    assert queue.num_tokens == 10


def test_an_empty_queue_has_no_head() -> None:
    """No head, no length."""
    queue = _queue()
    assert queue.head(0.0) is None
    assert len(queue) == 0


def test_classes_come_in_order() -> None:
    """The class decides before arrival."""
    queue = _queue(*(make_request(n, priority=p) for n, p in (("b", B), ("n", N), ("i", I))))
    assert _order(queue) == "inb"
    assert queue.num_by_priority() == {I: 1, N: 1, B: 1}


def test_a_head_rises_a_class_each_aging_seconds_and_then_goes_first() -> None:
    """At equal rank the older one is first; past the highest class nobody is before it."""
    old = make_request("b", priority=B)
    queue = _queue(
        old,
        make_request("n", priority=N, client="n", arrival=15.0),
        make_request("i", priority=I, client="i", arrival=29.0),
    )
    assert _order(queue, 9.0) == "inb"
    assert _order(queue, 10.0) == "ibn"
    assert _order(queue, 20.0) == "bin"
    assert _order(queue, 30.0)[0] == "b"


def test_a_flow_does_not_age_by_its_length() -> None:
    """Of many old requests of one client only the head is old: each admission starts anew."""
    flood = [make_request(name, priority=B, client="flood") for name in "abcd"]
    queue = _queue(*flood, make_request("x", priority=I, client="x", arrival=99.0))
    assert _order(queue, 100.0) == "axbcd"


def test_the_client_that_was_served_least_is_next() -> None:
    """Prompts count when they are admitted: long ones cost more turns."""
    queue = _queue(
        *(make_request(name, 8, client="long") for name in "ABC"),
        *(make_request(name, 4, client="short") for name in "uvwx"),
    )
    assert _order(queue) == "AuvBwxC"


def test_generated_tokens_count_to_their_client() -> None:
    """A client whose requests generate much falls behind one whose prompts are as long."""
    a, b = make_request("a", client="a"), make_request("b", client="b")
    queue = _queue(a, b, make_request("c", client="a"), make_request("d", client="b"))
    queue.admit(a, 0.0)
    queue.admit(b, 0.0)
    assert _order(queue) == "cd"
    queue.charge_output(a)
    assert _order(queue) == "dc"


def test_a_client_that_comes_back_has_saved_nothing_up() -> None:
    """It starts from the lowest counter of those that wait, not from its own old one."""
    queue = _queue(*(make_request(str(n), client="busy") for n in range(9)))
    for _ in range(5):
        head = queue.head(0.0)
        assert head is not None
        queue.admit(head, 0.0)
    for number, name in enumerate("uvw", start=10):
        late = make_request(name, client="late")
        late.sequence_id = SequenceId(number)
        queue.push(late)
    assert _order(queue) == "5u6v7w8"


def test_preempted_requests_come_first_in_their_class_and_are_not_counted_twice() -> None:
    """Their prompt was counted when they were admitted for the first time."""
    a, b = make_request("a", client="a"), make_request("b", client="b")
    queue = _queue(a, b)
    queue.admit(a, 0.0)
    a.status = RequestStatus.PREEMPTED
    queue.push(a)
    assert _order(queue) == "ab"


def test_a_request_that_gave_way_runs_a_class_higher() -> None:
    """Its place in the queue is that of its class; its rank rises each time, to the highest."""
    ranks = []
    for num_yields in range(4):
        gone, new = make_request("g", priority=B), make_request("n", priority=N)
        queue = _queue(gone, new)
        gone.num_yields = num_yields
        assert _order(queue) == "ng"
        queue.admit(gone, 0.0)
        ranks.append(gone.rank)
    assert ranks == [2, 1, 0, 0]


def test_paused_requests_are_passed_over() -> None:
    """They stay in the queue and hold nobody up."""
    a, b = make_request("a"), make_request("b")
    queue = _queue(a, b)
    queue.set_paused(a, is_paused=True)
    assert _order(queue) == "b"
    assert len(queue) == 2


def test_b52_clients_of_any_number_leave_little_behind() -> None:
    """Ten thousand names: their counters are bounded, and who is waiting is served in order."""
    queue = _queue()
    running = []
    for number in range(10_000):
        request = make_request("a", client=str(number))
        request.sequence_id = SequenceId(number)
        queue.push(request)
        queue.admit(request, 0.0)
        running.append(request)
        if number >= 2000:
            # Generates still, although its counter was forgotten long ago.
            queue.charge_output(running[number - 2000])
    queue.push(running[0])
    assert len(queue._shares[N]._served) <= MAX_CLIENTS
    queue.remove(running[0].request_id)
    assert not queue._flows


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


def test_the_kept_order_is_the_one_made_anew() -> None:
    """Whatever happens between two questions: time, arrivals, ends, pauses, tokens, ageing."""
    source = random.Random(5)
    queue, now = _queue(aging_seconds=3.0), 0.0
    waiting: list[Request] = []
    running: list[Request] = []
    asked = 0
    for number in range(1, 3000):
        now += source.choice((0.0, 0.01, 0.5, 2.0))
        what = source.random()
        if what < 0.3 or not waiting:
            request = make_request(
                str(number), priority=source.choice(list(Priority)), client=source.choice("abcde")
            )
            request.sequence_id = SequenceId(number)
            request.waiting_since = now - source.choice((0.0, 1.0))
            queue.push(request)
            waiting.append(request)
        elif what < 0.45:
            request = waiting.pop(source.randrange(len(waiting)))
            queue.admit(request, now)
            running.append(request)
        elif what < 0.55:
            queue.remove(waiting.pop(source.randrange(len(waiting))).request_id)
        elif what < 0.6:
            queue.set_paused(source.choice(waiting), is_paused=source.random() < 0.5)
        elif what < 0.7 and running:
            queue.charge_output(source.choice(running))
        elif what < 0.72:
            queue.aging_seconds = source.choice((2.0, 3.0))
        if source.random() < 0.3:
            queue.head(now)
        asked += 1
        assert list(queue.ordered(now)) == list(queue.ordered_anew(now))
    assert asked > 2000
