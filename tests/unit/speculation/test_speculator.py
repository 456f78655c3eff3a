"""What the speculator asks for, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.core import (
    CostCurve,
    CostPoint,
    Request,
    RequestId,
    SampledRow,
    SchedulerState,
    SequenceId,
    apply,
    cancel,
    plan,
    submit,
)
from scheduler_service.speculation import (
    AdaptiveController,
    DraftModelProposer,
    FixedController,
    LookupProposer,
    Proposal,
    ProposerKind,
    RowCounts,
    Speculator,
)
from scheduler_service.speculation.naps import LONGEST_NAP
from scheduler_service.speculation.speculator import MAX_SEQUENCES
from tests.support.core_scenarios import (
    answer,
    make_limits,
    make_request,
    open_waiting,
    run_step,
    state_with,
)

A, B = RequestId("a"), RequestId("b")


class Echo:
    """Proposes token 9 as often as it may, and keeps what it was asked."""

    kind = ProposerKind.LOOKUP

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.forgotten: list[int] = []

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return nines."""
        self.asked.append((request.request_id, max_tokens))
        return Proposal((9,) * max_tokens, 4)

    def forget(self, sequence_id: SequenceId) -> None:
        """Note who is forgotten."""
        self.forgotten.append(sequence_id)


def test_only_rows_of_one_token_are_drafted_for_and_never_past_the_last_token() -> None:
    echo = Echo()
    speculator = Speculator(echo, FixedController(8), 5)
    state = state_with(
        make_limits(chunk=4), make_request("a", 3, 9), make_request("b", 3, 3),
        make_request("c", 3, 2), make_request("d", 3, 9),
    )  # fmt: skip
    state.requests[RequestId("d")].takes_drafts = False
    run_step(state)
    submit(state, make_request("long", 12))
    open_waiting(state)
    assert speculator.draft(state) == {A: (9,) * 5, B: (9,)}
    # c's next token is its last one; d takes none.
    assert echo.asked == [("a", 5), ("b", 1)]


def test_a_full_step_has_no_room_for_drafts() -> None:
    speculator = Speculator(Echo(), FixedController(8), 8)
    state = state_with(make_limits(tokens=4, chunk=4), make_request("a", 3, 9))
    run_step(state)
    submit(state, make_request("b", 9))
    run_step(state)
    assert speculator.draft(state) == {}


def test_nobody_is_asked_beside_very_many_sequences() -> None:
    echo = Echo()
    speculator = Speculator(echo, FixedController(8), 8)
    limits = make_limits(tokens=512, seqs=100, waiting=100, blocks=400)
    requests = [make_request(str(index), 3, 9) for index in range(MAX_SEQUENCES + 1)]
    state = state_with(limits, *requests)
    while len(state.waiting):
        run_step(state)
    assert speculator.draft(state) == {}
    assert not echo.asked
    cancel(state, requests[0].request_id)
    assert len(speculator.draft(state)) == MAX_SEQUENCES


def test_no_step_waits_for_drafts_of_very_many_sequences() -> None:
    """Whatever was found while there were fewer, it would wait in vain."""
    speculator = Speculator(Echo(), AdaptiveController(), 8, DraftModelProposer(64, 512, 512))
    # On a device where rows cost next to nothing.
    points = [CostPoint(count, count, 0, 1.0 + count / 1000) for count in (1, 64, 512)]
    limits = make_limits(tokens=512, seqs=100, waiting=100, blocks=900)
    limits = replace(limits, cost_curve=CostCurve(points))
    state = state_with(limits, *(make_request(str(each), 3, 99) for each in range(MAX_SEQUENCES)))
    while len(state.waiting):
        run_step(state)
    _advance(speculator, state, 1)
    batch = plan(state, 0.0, speculator.draft(state))
    assert batch is not None
    assert speculator.may_draft(state)
    apply(state, batch, answer(batch))
    submit(state, make_request("more", 3, 99))
    run_step(state)
    batch = plan(state, 0.0, speculator.draft(state))
    assert batch is not None
    assert not speculator.may_draft(state)


def test_rows_are_counted_and_the_accounts_settled() -> None:
    controller = AdaptiveController()
    speculator = Speculator(Echo(), controller, 4)
    request = make_request("a", 3, 30)
    state = state_with(make_limits(), request)
    run_step(state)
    counts: list[RowCounts] = []
    for _ in range(6):
        batch = plan(state, 0.0, speculator.draft(state))
        assert batch is not None
        accepted = batch.rows[0].draft_token_ids
        sampled = {A: SampledRow(9, None, accepted)}
        counts += speculator.learn(batch, sampled, 1.0)
        apply(state, batch, sampled)
    assert counts[-1] == RowCounts(4, 4)
    assert controller.saved_seconds(request.sequence_id) > 0
    assert speculator.num_known == 1


def test_ended_sequences_are_let_go_of() -> None:
    echo = Echo()
    speculator = Speculator(echo, FixedController(1), 4)
    state = state_with(make_limits(), make_request("a", 3, 9), make_request("b", 3, 3))
    while state.requests:
        run_step(state)
        speculator.draft(state)
    speculator.forget_ended(state)
    assert speculator.num_known == 0
    assert sorted(echo.forgotten) == [1, 2]


def test_an_answer_to_a_step_without_drafts_teaches_nothing_wrong() -> None:
    """As after a session that was resumed with a step of an earlier one."""
    speculator = Speculator(LookupProposer(), AdaptiveController(), 4)
    state = state_with(make_limits(), make_request("a", 3, 9))
    batch, _ = run_step(state)
    assert speculator.learn(batch, {A: SampledRow(5)}, 1.0) == []


class Fickle(Echo):
    """Proposes nothing until it is told to."""

    has_something = False

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return nines or nothing."""
        proposal = super().propose(request, max_tokens)
        return proposal if self.has_something else Proposal(())


def _advance(speculator: Speculator, state: SchedulerState, num_steps: int) -> None:
    """Compute steps that draw nines and accept every draft."""
    for _ in range(num_steps):
        batch = plan(state, 0.0, speculator.draft(state))
        assert batch is not None
        sampled = {row.request_id: SampledRow(9, None, row.draft_token_ids) for row in batch.rows}
        speculator.learn(batch, sampled, 1.0)
        apply(state, batch, sampled)


def test_where_nothing_is_found_for_long_nobody_looks_at_every_step() -> None:
    fickle = Fickle()
    speculator = Speculator(fickle, AdaptiveController(), 4)
    state = state_with(make_limits(blocks=40), make_request("a", 3, 300))
    run_step(state)
    _advance(speculator, state, 24)
    fickle.asked.clear()
    _advance(speculator, state, 3 * LONGEST_NAP)
    assert len(fickle.asked) == 3
    # What turns up is found before the next nap has ended, and then nobody naps.
    fickle.has_something = True
    known = len(state.requests[A].output_token_ids)
    _advance(speculator, state, LONGEST_NAP + 6)
    assert len(state.requests[A].output_token_ids) - known > LONGEST_NAP + 6 + 3 * 4
    assert len(fickle.asked) > 6


def test_who_comes_ends_a_nap_and_a_fixed_number_never_naps() -> None:
    fickle = Fickle()
    speculator = Speculator(fickle, AdaptiveController(), 4)
    state = state_with(make_limits(blocks=40), make_request("a", 3, 300))
    run_step(state)
    _advance(speculator, state, 24)
    speculator.draft(state)  # so that a nap has begun
    fickle.asked.clear()
    speculator.draft(state)
    assert not fickle.asked
    submit(state, make_request("b", 3, 9))
    run_step(state)
    speculator.draft(state)
    assert {name for name, _ in fickle.asked} == {"a", "b"}

    eager = Fickle()
    fixed = Speculator(eager, FixedController(2), 4)
    state = state_with(make_limits(blocks=40), make_request("a", 3, 300))
    run_step(state)
    _advance(fixed, state, 24)
    assert len(eager.asked) == 24


def test_time_without_a_look_counts_as_time_without_drafts() -> None:
    """What a sequence may lose grows with its time, whether anybody looked at it or not."""
    spendable: list[float] = []
    for text in (Fickle(), Echo()):
        controller = AdaptiveController()
        speculator = Speculator(text, controller, 4)
        request = make_request("a", 3, 300)
        request.takes_drafts = isinstance(text, Fickle)
        state = state_with(make_limits(blocks=40), request)
        run_step(state)
        _advance(speculator, state, 100)
        # The rest of the last nap is booked with the next look: somebody went, and is back.
        assert not speculator._naps.is_on(0)
        _advance(speculator, state, 1)
        spendable.append(controller._record(request.sequence_id).plain_seconds)
    assert spendable[0] == spendable[1] > 90


def test_drafts_that_an_account_holds_back_are_looked_for_at_nearly_every_step() -> None:
    controller = AdaptiveController()
    echo = Echo()
    speculator = Speculator(echo, controller, 4)
    request = make_request("a", 3, 300)
    state = state_with(make_limits(blocks=40), request)
    run_step(state)
    _advance(speculator, state, 1)
    controller._record(request.sequence_id).saved_seconds = -3.0
    echo.asked.clear()
    _advance(speculator, state, 60)
    assert len(echo.asked) > 25
