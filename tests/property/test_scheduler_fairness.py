"""Nobody starves and nobody pays for another client's flood, whatever else arrives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import (
    NO_CURVE,
    CostCurve,
    CostPoint,
    Priority,
    Request,
    RequestAdmitted,
    RequestFinished,
    SchedulerState,
    apply,
    opened,
    openings,
    plan,
    record_kv_counts,
    submit,
)
from tests.support.core_scenarios import make_limits, make_request
from tests.support.fake_block_pool import FakeBlockPool

AGING_STEPS = 8.0
BLOCK_SIZE = 4
LONGEST = 16


@dataclass(frozen=True)
class Server:
    """A small server under load."""

    tokens: int
    seqs: int
    blocks: int
    curve: CostCurve


@dataclass(frozen=True)
class Other:
    """A request of the load: one arrives before each step, over and over."""

    prompt: int
    max_tokens: int
    priority: Priority
    # A client of its own, new each time, or one that all of these share.
    is_new_client: bool


CURVE = CostCurve(CostPoint(n, n, 0, 2.0 + n) for n in (1, 2, 4, 16))

servers = st.builds(
    Server,
    tokens=st.integers(1, 12),
    seqs=st.integers(1, 4),
    blocks=st.integers(LONGEST // BLOCK_SIZE, 12),
    curve=st.sampled_from([NO_CURVE, CURVE]),
)
others = st.builds(
    Other,
    prompt=st.integers(1, 8),
    max_tokens=st.integers(1, 8),
    priority=st.sampled_from(Priority),
    is_new_client=st.booleans(),
)


class Load:
    """Runs a server one step at a time and notes who was admitted and who ended when."""

    def __init__(self, server: Server, aging: float = AGING_STEPS) -> None:
        limits = make_limits(
            tokens=server.tokens,
            seqs=server.seqs,
            blocks=server.blocks,
            block_size=BLOCK_SIZE,
            waiting=100_000,
            aging=aging,
        )
        # Beside one decode row there is time for half a prompt, beside four for two tokens.
        limits = dataclasses.replace(limits, cost_curve=server.curve, max_step_seconds=8.0)
        self.state = SchedulerState(limits)
        self.pool = FakeBlockPool(BLOCK_SIZE, server.blocks)
        self.step = 0
        self.admitted: list[str] = []
        self.ended: dict[str, int] = {}

    def add(self, name: str, prompt: int, max_tokens: int, priority: Priority, client: str) -> None:
        """Submit a request that arrives now."""
        # Prompts differ, so that none is the start of another.
        tokens = [(len(self.state.requests) + each) % 13 for each in range(prompt)]
        request: Request = make_request(
            name, tokens, max_tokens, priority=priority, client=client, arrival=float(self.step)
        )
        submit(self.state, request)

    def advance(self) -> None:
        """Open, plan and compute one step."""
        while found := openings(self.state, float(self.step)):
            opened(self.state, self.pool.open(found))
            record_kv_counts(self.state, self.pool.cache.counts())
        batch = plan(self.state, float(self.step))
        self.step += 1
        if batch is None:
            return
        for event in batch.events:
            if isinstance(event, RequestAdmitted) and not event.is_readmission:
                self.admitted.append(event.request_id)
        sampled = self.pool.run(batch)
        assert sampled is not None, "what was planned fits"
        for event in apply(self.state, batch, sampled):
            if isinstance(event, RequestFinished):
                self.ended[event.request_id] = self.step
        if self.step % 8 == 0:
            self.state.check_invariants()
        record_kv_counts(self.state, self.pool.cache.counts())


@given(servers, st.lists(others, min_size=1, max_size=6), st.sampled_from(Priority))
def test_every_request_ends_under_a_load_that_never_ends(
    server: Server, load: list[Other], priority: Priority
) -> None:
    """A request that is met by more work than the server can do, of any class and client.

    It is overdue after its ageing; by then every request that is before it for ever has come,
    and each of these takes at most so many steps as it has tokens and as it gives way.
    """
    trace = Load(server)
    trace.add("mine", LONGEST // 2, LONGEST // 2, priority, "mine")
    bound = int(AGING_STEPS * (priority + 2)) * LONGEST * 4
    while "mine" not in trace.ended:
        other = load[trace.step % len(load)]
        name = str(trace.step)
        client = name if other.is_new_client else "shared"
        trace.add(name, other.prompt, other.max_tokens, other.priority, client)
        trace.advance()
        assert trace.step <= bound, "starved"


@given(servers, others, st.integers(1, 30), st.sampled_from(Priority))
def test_a_flood_delays_another_client_by_one_request(
    server: Server, flood: Other, num_steps: int, priority: Priority
) -> None:
    """Of the waiting requests of one client at most one more is admitted first (and one more
    for each time that it would starve, which is left out here)."""
    trace = Load(server, aging=1e9)
    for number in range(40):
        trace.add(f"flood {number}", flood.prompt, flood.max_tokens, priority, "flood")
    for _ in range(num_steps):
        trace.advance()
    num_before = len(trace.admitted)
    trace.add("single", 1, 1, priority, "single")
    while "single" not in trace.admitted:
        trace.advance()
    assert trace.admitted.index("single") - num_before <= 1


@given(servers, st.integers(1, 8), st.integers(1, 8))
def test_two_clients_with_much_to_do_are_served_alike(server: Server, one: int, two: int) -> None:
    """By tokens, not by requests: the difference is never more than a request of each."""
    trace = Load(server, aging=1e9)
    served = {"a": 0, "b": 0}
    prompts = {"a": one, "b": two}
    for number in range(20):
        for client, prompt in prompts.items():
            trace.add(f"{client} {number}", prompt, 1, Priority.NORMAL, client)
    # Until one of them may have nobody waiting.
    while len(trace.admitted) < 20:
        trace.advance()
    # The token that each generates counts double, but only once it is there.
    costs = {client: prompt + 2 for client, prompt in prompts.items()}
    for name in trace.admitted:
        served[name[0]] += costs[name[0]]
        assert (
            max(served.values()) - min(served.values()) <= 2 * max(costs.values()) + 2 * server.seqs
        )
