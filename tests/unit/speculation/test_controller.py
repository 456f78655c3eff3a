"""What the controllers choose, and what they book."""

from __future__ import annotations

import pytest

from scheduler_service.core import SequenceId
from scheduler_service.speculation import (
    AdaptiveController,
    FixedController,
    PlainStep,
    Proposal,
    StepSeconds,
)
from scheduler_service.speculation.acceptance import Acceptance
from scheduler_service.speculation.controller import FIRST_STEPS, MAX_CREDIT_STEPS, TOLERANCE
from tests.support.speculated_text import curve

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
STRONG = Proposal((1,) * 8, 40)
FLAT = curve(1.0, 0.001)
STEEP = curve(1.0, 1.0)


def step(
    *ids: SequenceId, room: int = 64, seconds: StepSeconds = FLAT, prompt: int = 0
) -> PlainStep:
    """Return a step in which these sequences decode beside `prompt` tokens of prompts."""
    return PlainStep(ids, room, lambda n: seconds(n + prompt), seconds(len(ids)))


def teach(controller: AdaptiveController, *ids: SequenceId, right: bool = True) -> None:
    """Let strong proposals of these sequences be right (or wrong) for a long while."""
    for each in ids:
        for _ in range(60):
            controller.learn(each, STRONG, (1,) * 8 if right else (0,) * 8)


def test_shares_follow_what_happened_and_older_drafts_fade() -> None:
    acceptance = Acceptance()
    before = acceptance.share(10)
    assert acceptance.learn_run(10, (1, 1, 1), (1, 1, 1)) == 3
    assert acceptance.share(10) > before
    for _ in range(100):
        assert acceptance.learn_run(10, (1, 1), (0, 1)) == 0
    assert acceptance.share(10) < 0.01
    for _ in range(100):
        acceptance.learn(10, is_right=True)
    assert acceptance.share(10) > 0.99


def test_a_run_is_counted_up_to_its_first_wrong_draft_by_rising_strength() -> None:
    acceptance, untouched = Acceptance(), Acceptance()
    assert acceptance.learn_run(3, (1, 1, 1, 1), (1, 1, 0, 0)) == 2
    assert acceptance.share(3) > untouched.share(3)
    # 4 right, 5 wrong, 6 and more not looked at.
    assert acceptance.share(16) == untouched.share(16)


def test_cheap_rows_and_good_drafts_are_all_taken() -> None:
    controller = AdaptiveController()
    teach(controller, A)
    assert controller.choose(step(A), {A: STRONG}) == {A: 8}


def test_rows_that_cost_as_much_as_steps_are_not() -> None:
    controller = AdaptiveController()
    teach(controller, A)
    assert controller.choose(step(A, seconds=STEEP), {A: STRONG}) == {}


def test_bad_drafts_are_not_taken_however_cheap() -> None:
    controller = AdaptiveController()
    teach(controller, A, right=False)
    assert controller.choose(step(A), {A: STRONG}) == {}


def test_an_unknown_cost_means_no_drafts() -> None:
    controller = AdaptiveController()
    teach(controller, A)
    assert controller.choose(step(A, seconds=lambda n: 0.0), {A: STRONG}) == {}


def test_a_jump_in_the_curve_is_looked_across() -> None:
    """The second row costs a third of a step, those after it nothing: one draft never pays."""
    controller = AdaptiveController()
    teach(controller, A)
    jump = curve(1.0, 0.0, jump=1.2)
    controller.settle(step(A, seconds=curve(1.0, 0.0)), 0, {A: 4})
    assert controller.choose(step(A, seconds=jump, room=1), {A: STRONG}) == {}
    assert controller.choose(step(A, seconds=jump), {A: STRONG}) == {A: 8}


@pytest.mark.parametrize("room", [0, 1, 3, 8])
def test_room_is_kept(room: int) -> None:
    controller = AdaptiveController()
    teach(controller, A, B)
    chosen = controller.choose(step(A, B, room=room), {A: STRONG, B: STRONG})
    assert sum(chosen.values()) == room


def test_room_goes_to_the_likeliest_drafts_and_evenly_to_equal_ones() -> None:
    controller = AdaptiveController()
    teach(controller, A, B)
    teach(controller, C, right=False)
    chosen = controller.choose(step(A, B, C, room=6), {A: STRONG, B: STRONG, C: STRONG})
    assert chosen == {A: 3, B: 3}


def test_a_neighbour_without_credit_bounds_what_others_spend() -> None:
    """A drafts well but B has no drafts: the step grows by what B's account bears."""
    controller = AdaptiveController()
    teach(controller, A)
    seconds = curve(1.0, 0.12)
    both = step(A, B, seconds=seconds)
    plain = seconds(2)
    # One row costs 0.12; the account bears (0.25 + 0.015) * 1.12.
    assert controller.choose(both, {A: STRONG}) == {A: 2}
    controller.settle(both, 2, {A: 3, B: 1})
    assert controller.saved_seconds(B) == pytest.approx(-0.24)
    assert controller.choose(both, {A: STRONG}) == {}
    controller.forget(B)
    assert controller.choose(both, {A: STRONG}) == {A: 2}
    assert (FIRST_STEPS + TOLERANCE) * plain == pytest.approx(0.2968)


def test_accounts_book_what_was_saved_and_lost() -> None:
    controller = AdaptiveController()
    seconds = curve(1.0, 0.5)
    controller.settle(step(A, B, seconds=seconds), 3, {A: 3, B: 1})
    assert controller.saved_seconds(A) == pytest.approx(2 * 1.5 - 1.5)
    assert controller.saved_seconds(B) == pytest.approx(-1.5)
    controller.settle(step(A, seconds=seconds, prompt=4), 1, {A: 2})
    assert controller.saved_seconds(A) == pytest.approx(1.5 + 1.0 - 0.5)  # the step saved is plain
    for _ in range(50):
        controller.settle(step(A, seconds=seconds), 0, {A: 9})
    assert controller.saved_seconds(A) == pytest.approx(MAX_CREDIT_STEPS)


def test_what_is_kept_is_let_go() -> None:
    controller = AdaptiveController()
    teach(controller, A)
    controller.forget(A)
    controller.forget(B)
    assert len(controller) == 0


def test_a_fixed_number_is_kept_to_while_there_is_room() -> None:
    controller = FixedController(3)
    proposals = {A: STRONG, B: Proposal((1,), 2), C: STRONG}
    assert controller.choose(step(A, B, C), proposals) == {A: 3, B: 1, C: 3}
    assert controller.choose(step(A, B, C, room=5), proposals) == {A: 3, B: 1, C: 1}
