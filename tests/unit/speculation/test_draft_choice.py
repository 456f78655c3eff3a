"""For whom the draft model is asked, and that nobody pays for it."""

from __future__ import annotations

import pytest

from scheduler_service.core import NO_CURVE, SequenceId
from scheduler_service.speculation import AdaptiveController, FixedController, PlainStep
from scheduler_service.speculation.draft_choice import (
    FIRST_WAIT,
    Candidate,
    DraftRecord,
    DraftStep,
    choose,
)
from scheduler_service.speculation.draft_costs import FIRST_OVERHEAD_SECONDS, DraftCosts
from scheduler_service.speculation.draft_work import DraftRow, DraftWork
from tests.support.drafted_text import DraftSimulation, Text, draft_curve
from tests.support.speculated_text import curve

A, B = SequenceId(1), SequenceId(2)
# A target whose step takes 8 ms, and a draft model at a tenth of that.
TARGET = curve(0.008, 0.0004)
DRAFT = draft_curve(0.0008, 0.0001, 0.00002)
BAD: Text = lambda i: 0.03  # noqa: E731
FAIR: Text = lambda i: 0.5  # noqa: E731
GOOD: Text = lambda i: 0.85  # noqa: E731
TURNING: Text = lambda i: 0.9 if i % 200 < 60 else 0.05  # noqa: E731


def room(spendable: float, rows: int = 1) -> DraftStep:
    """A step with so much on the accounts."""
    return DraftStep(rows, 64, TARGET, spendable)


def asked(share: float, spendable: float = 1.0, missing: int = 1, max_drafts: int = 8) -> int:
    """Return the drafts for one sequence of that record."""
    found = choose(
        room(spendable), {A: Candidate(max_drafts, missing)}, {A: DraftRecord(share)},
        DraftCosts(DRAFT), 1.02,
    )  # fmt: skip
    return found.num_drafts.get(A, 0)


def test_good_drafts_are_asked_for_and_bad_ones_are_not() -> None:
    assert asked(0.9) == 8
    assert asked(0.6) > 0
    assert asked(0.1) == 0
    assert asked(0.9, max_drafts=3) == 3


def test_at_worst_an_account_is_not_overdrawn() -> None:
    """The passes, the way there and back and the rows that verify must fit."""
    for spendable in (0.0, 0.001, 0.002, 0.004, 0.008):
        depth = asked(0.95, spendable)
        worst = FIRST_OVERHEAD_SECONDS + depth * 0.0008 + depth * 0.0004
        assert depth == 0 or worst <= spendable + 1e-12
        more = worst + 0.0012 if depth else FIRST_OVERHEAD_SECONDS + 0.0012
        assert more > spendable or depth == 8


def test_the_better_sequence_alone_where_the_other_would_only_cost() -> None:
    records = {A: DraftRecord(0.9), B: DraftRecord(0.05)}
    candidates = {A: Candidate(8, 1), B: Candidate(8, 1)}
    found = choose(room(1.0, 2), candidates, records, DraftCosts(DRAFT), 1.02)
    assert set(found.num_drafts) == {A}
    assert 0.1 < found.min_confidence < 0.9


def test_what_was_bad_is_tried_again_after_longer_and_longer() -> None:
    record, costs = DraftRecord(0.05), DraftCosts(DRAFT)
    tried = []
    for token in range(400):
        found = choose(room(1.0), {A: Candidate(8, 1)}, {A: record}, costs, 1.02)
        if found:
            assert dict(found.num_drafts) == {A: 1}
            tried.append(token)
        record.num_since += 1
    assert tried == [FIRST_WAIT, 3 * FIRST_WAIT, 7 * FIRST_WAIT, 15 * FIRST_WAIT]


def test_costs_follow_what_was_measured() -> None:
    costs = DraftCosts(DRAFT)
    row = DraftRow(A, 0, 5, (1, 2), 3)
    work = DraftWork((row, DraftRow(B, 0, 5, (1,), 1)))
    before = costs.work_seconds(work)
    assert before == pytest.approx(0.0008 + 0.00002 * 2 + 2 * 0.0008, rel=0.1)
    for _ in range(200):
        costs.observe(costs.work_seconds(work), 2 * before, 2 * before + 0.002)
    assert costs.work_seconds(work) == pytest.approx(2 * before, rel=0.05)
    assert costs.overhead_seconds == pytest.approx(0.002, rel=0.05)
    assert costs.pass_seconds(1) == pytest.approx(0.0016, rel=0.05)


def test_without_a_curve_a_pass_is_a_share_of_a_step() -> None:
    costs = DraftCosts(NO_CURVE)
    assert costs.pass_seconds(1) == 0
    costs.set_plain_step(0.01)
    assert 0 < costs.pass_seconds(1) < costs.pass_seconds(8) < 0.01


def test_a_fixed_number_is_asked_for_whatever_it_costs() -> None:
    step = PlainStep((A, B), 64, TARGET, TARGET(2))
    candidates = {A: Candidate(8, 500), B: Candidate(2, 1)}
    found = FixedController(3).ask(step, candidates, DraftCosts(DRAFT))
    assert dict(found.num_drafts) == {A: 3, B: 2}
    assert found.min_confidence == 0


@pytest.mark.parametrize("num_streams", [1, 4, 8])
@pytest.mark.parametrize(
    "texts",
    [(BAD,), (BAD, GOOD), (TURNING, BAD, FAIR), (FAIR,)],
    ids=["bad", "mixed", "turning", "fair"],
)
def test_no_sequence_is_slower_by_more_than_three_percent(
    texts: tuple[Text, ...], num_streams: int
) -> None:
    """Whatever the texts, the neighbours and the prompts, drafts' own cost included."""
    for seed, num_prompt_tokens in ((1, 10), (2, 200)):
        found = DraftSimulation(
            [texts[i % len(texts)] for i in range(num_streams)], 300, TARGET, DRAFT,
            AdaptiveController(), num_prompt_tokens=num_prompt_tokens, seed=seed,
        ).run()  # fmt: skip
        assert max(found.slowdowns()) < 1.03


def test_a_good_draft_model_makes_streams_faster() -> None:
    found = DraftSimulation([GOOD], 400, TARGET, DRAFT, AdaptiveController()).run()
    assert found.slowdowns()[0] < 0.65
    four = DraftSimulation([GOOD] * 4, 400, TARGET, DRAFT, AdaptiveController()).run()
    assert max(four.slowdowns()) < 0.9
    fair = DraftSimulation([FAIR], 400, TARGET, DRAFT, AdaptiveController()).run()
    assert fair.slowdowns()[0] < 0.97


def test_a_bad_draft_model_is_hardly_asked() -> None:
    found = DraftSimulation([BAD], 400, TARGET, DRAFT, AdaptiveController()).run()
    assert 0 < found.num_asked < 40
