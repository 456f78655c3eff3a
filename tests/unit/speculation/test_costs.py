"""What is expected of a step's time."""

from __future__ import annotations

import pytest

from scheduler_service.speculation.costs import MAX_COUNTED, StepCosts, assumed_curve


def flat(num_tokens: int) -> float:
    """Return the curve of a machine on which further tokens cost nothing."""
    return 0.01


def test_the_curve_speaks_until_a_step_was_run() -> None:
    assert StepCosts().seconds(3, assumed_curve) == 1.25


def test_the_pace_of_a_busy_machine_moves_all_numbers_alike() -> None:
    costs = StepCosts()
    for _ in range(200):
        costs.observe(1, 2.0, assumed_curve)
    assert costs.seconds(1, assumed_curve) == pytest.approx(2.0)
    assert costs.seconds(9, assumed_curve) == pytest.approx(4.0)


def test_a_curve_that_is_wrong_is_corrected_where_steps_are_run() -> None:
    costs = StepCosts()
    for _ in range(40):
        costs.observe(1, 0.01, flat)
        costs.observe(9, 0.02, flat)
    ratio = costs.seconds(9, flat) / costs.seconds(1, flat)
    assert ratio == pytest.approx(2.0, rel=0.1)
    # Of numbers that were not run the curve still speaks, at the pace of all.
    assert 0.01 < costs.seconds(5, flat) < 0.02


def test_it_follows_when_the_machine_changes_and_only_the_pace_does() -> None:
    costs = StepCosts()
    for pace in (1.0, 3.0):
        for _ in range(300):
            costs.observe(1, pace, assumed_curve)
            costs.observe(5, 1.5 * pace, assumed_curve)
    assert costs.seconds(1, assumed_curve) == pytest.approx(3.0, rel=0.05)
    assert costs.seconds(5, assumed_curve) == pytest.approx(4.5, rel=0.05)


def test_one_step_that_hung_is_not_believed() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 1.0, assumed_curve)
    costs.observe(1, 1000.0, assumed_curve)
    assert costs.seconds(1, assumed_curve) < 1.1


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 1.0), (MAX_COUNTED + 1, 1.0), (1, 0.0)])
def test_what_says_nothing_is_left_out(num_tokens: int, seconds: float) -> None:
    costs = StepCosts()
    costs.observe(num_tokens, seconds, assumed_curve)
    assert costs.seconds(1, assumed_curve) == 1.0


def test_a_curve_without_points_is_not_divided_by() -> None:
    costs = StepCosts()
    costs.observe(1, 1.0, lambda n: 0.0)
    assert costs.seconds(1, lambda n: 0.0) == 0.0


def test_a_machine_that_has_just_become_slower_makes_no_draft_cheap() -> None:
    """Steps without drafts show it at once; those with drafts are not run meanwhile."""
    costs = StepCosts()
    for _ in range(40):
        costs.observe(1, 1.0, assumed_curve)
    for _ in range(10):
        costs.observe(4, 2 * 1.375, assumed_curve)
    alone = costs.seconds(4, assumed_curve)
    assert costs.seconds(5, assumed_curve) < alone
    assert costs.seconds_beyond(4, 4, assumed_curve) == alone
    assert costs.seconds_beyond(4, 5, assumed_curve) == pytest.approx(alone * 1.5 / 1.375)
    # What was seen of them counts as well, but never for less than nothing.
    for _ in range(5):
        costs.observe(5, 0.1, assumed_curve)
    assert costs.seconds_beyond(4, 5, assumed_curve) == costs.seconds(4, assumed_curve)
    for _ in range(100):
        costs.observe(5, 9.0, assumed_curve)
    assert costs.seconds_beyond(4, 5, assumed_curve) == pytest.approx(9.0, rel=0.1)


def test_what_one_number_of_drafts_adds_tells_of_the_others_for_a_while() -> None:
    """A kernel path may begin with the next row, between two points of the curve."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(4, 1.375, assumed_curve)
    before = costs.seconds_beyond(4, 6, assumed_curve)
    for _ in range(6):
        costs.observe(4, 1.375, assumed_curve)
        costs.observe(5, 2.0, assumed_curve, num_drafts=1)
    after = costs.seconds_beyond(4, 6, assumed_curve)
    assert before == pytest.approx(1.625)
    assert after > 2.0
    # Streams of other numbers are not concerned, and it is not believed for ever.
    assert costs.seconds_beyond(1, 2, assumed_curve) < 1.4
    for _ in range(1000):
        costs.observe(4, 1.375, assumed_curve)
    assert costs.seconds_beyond(4, 6, assumed_curve) == pytest.approx(1.625, rel=0.01)
