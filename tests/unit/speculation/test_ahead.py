"""What drafts cost where steps are sent ahead of an answer, and when it pays to wait for them."""

from __future__ import annotations

import pytest

from scheduler_service.speculation import StepSeconds
from scheduler_service.speculation.ahead import FIRST_SAVING, MAX_SAVING, AheadSaving, Prospects
from scheduler_service.speculation.costs import StepCosts, assumed_curve
from tests.support.ahead_simulation import AheadSimulation, Repeats, stretches
from tests.support.speculated_text import curve

CPU = curve(1.0, 0.2)
GPU = curve(1.0, 0.03)


def shifted(text: Repeats, count: int) -> list[Repeats]:
    """Return the text for so many streams, each at another place of it."""

    def at(start: int) -> Repeats:
        return lambda index: text(index + start)

    return [at(7 * each) for each in range(count)]


def test_a_saving_is_learnt_where_both_kinds_of_steps_are_seen() -> None:
    saving = AheadSaving()
    assert saving.share(4) == pytest.approx(FIRST_SAVING)
    for _ in range(600):
        saving.observe(4, 1.0, is_ahead=False)
        saving.observe(4, 0.88, is_ahead=True)
    assert saving.share(4) == pytest.approx(0.12, abs=0.01)
    assert saving.share(8) == pytest.approx(FIRST_SAVING)
    for _ in range(2000):
        saving.observe(4, 1.0, is_ahead=False)
        saving.observe(4, 0.2, is_ahead=True)
    assert saving.share(4) == MAX_SAVING


def test_a_saving_is_never_below_nothing() -> None:
    saving = AheadSaving()
    for _ in range(600):
        saving.observe(1, 1.0, is_ahead=False)
        saving.observe(1, 1.3, is_ahead=True)
    assert saving.share(1) == 0.0


def test_one_kind_alone_teaches_nothing() -> None:
    """What is expected follows the steps there are, so it says nothing of those there are not."""
    saving = AheadSaving()
    for _ in range(2000):
        saving.observe(2, 1.0, is_ahead=True)
    assert saving.share(2) == pytest.approx(FIRST_SAVING, abs=0.001)


@pytest.mark.parametrize("run", [1, 20, 300])
def test_steps_sent_ahead_count_as_what_they_would_have_taken(run: int) -> None:
    """Whether the two kinds take turns or come in long runs."""
    costs = StepCosts()
    for index in range(3000):
        is_ahead = index // run % 2 == 0
        costs.observe(2, 0.9 if is_ahead else 1.0, assumed_curve, is_ahead=is_ahead)
    assert costs.seconds(2, assumed_curve) == pytest.approx(1.0, abs=0.03)
    assert costs.ahead_seconds(2, assumed_curve) == pytest.approx(0.1, abs=0.03)


def test_a_wait_is_worth_what_came_of_such_waits() -> None:
    prospects = Prospects()
    after_one = 1.0
    for _ in range(100):
        prospects.observe(0.5)
        prospects.observe(None)
        after_one = prospects.gain
        prospects.observe(None)
    # Right behind drafts there were none each time, and after two quiet steps some each time.
    assert after_one == pytest.approx(0.0, abs=0.01)
    assert prospects.gain == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("saving", [0.05, 0.1])
@pytest.mark.parametrize("seconds", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("num_streams", [1, 4, 8])
@pytest.mark.parametrize(
    "text", [stretches(1, 12, 0.7), stretches(4, 20, 0.7), lambda index: 0.0],
    ids=["single words", "short stretches", "always wrong"],
)  # fmt: skip
def test_seldom_drafts_do_not_cost_everybody_the_steps_sent_ahead(
    text: Repeats, num_streams: int, seconds: StepSeconds, saving: float
) -> None:
    """A wait costs all streams what a step sent ahead saves, and is booked for all of them."""
    run = AheadSimulation(shifted(text, num_streams), seconds, saving, num_tokens=160)
    assert run.slowdown() <= 1.03
    assert run.num_ahead >= 0.5 * run.num_steps


@pytest.mark.parametrize(
    ("num_streams", "seconds", "most"), [(1, CPU, 0.65), (1, GPU, 0.45), (8, GPU, 0.7)],
    ids=["cpu alone", "gpu alone", "gpu, eight"],
)  # fmt: skip
def test_text_that_repeats_itself_still_gains(
    num_streams: int, seconds: StepSeconds, most: float
) -> None:
    texts = shifted(stretches(20, 4, 0.93), num_streams)
    assert AheadSimulation(texts, seconds, num_tokens=160).slowdown() <= most


def test_where_nothing_is_proposed_nearly_all_steps_are_sent_ahead() -> None:
    run = AheadSimulation([lambda index: None] * 2, CPU, num_tokens=160)
    run.run()
    assert run.num_steps == 160
    assert run.num_ahead >= 155
