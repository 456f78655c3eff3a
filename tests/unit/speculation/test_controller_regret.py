"""How close the controller comes to the best fixed choice, in a simulation with its own clock."""

from __future__ import annotations

import pytest

from scheduler_service.speculation import AdaptiveController, FixedController, StepSeconds
from tests.support.speculated_text import Simulation, Text, curve

# Costs of rows like those of this project's CPU kernels, of a GPU at rest, and of a full one.
CURVES = {
    "cheap rows": curve(1.0, 0.03),
    "dear rows": curve(1.0, 0.25),
    "a jump to the second row": curve(1.0, 0.02, jump=0.35),
    "rows as dear as steps": curve(1.0, 1.0),
}
# Seconds of the plain steps that earn a first draft, where rows are dear.
EARNING = 10.0
STEADY = {"never": 0.0, "seldom": 0.15, "half": 0.5, "mostly": 0.85, "nearly always": 0.97}


def steady(chance: float) -> Text:
    """Return a text whose drafts are right with one chance throughout."""
    return lambda _: chance


def by_turns(length: int) -> Text:
    """Return a text of stretches that are copied and stretches that are new."""
    return lambda n: 0.95 if n // length % 2 else 0.02


def best_fixed(texts: list[Text], seconds: StepSeconds) -> float:
    """Return the shortest time of all fixed numbers of drafts, 0 included."""
    return min(
        max(Simulation(texts, 400, seconds, FixedController(k)).run().ends) for k in range(9)
    )


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("kind", STEADY)
def test_one_stream_of_steady_text(name: str, kind: str) -> None:
    """Near the best number known beforehand, once a first draft is earned; never 3% over none."""
    texts = [steady(STEADY[kind])]
    run = Simulation(texts, 400, CURVES[name], AdaptiveController()).run()
    assert run.ends[0] <= 1.12 * best_fixed(texts, CURVES[name]) + EARNING
    assert max(run.slowdowns()) <= 1.03


@pytest.mark.parametrize("name", CURVES)
def test_text_that_turns_is_followed(name: str) -> None:
    """Where stretches differ, no fixed number keeps up."""
    texts = [by_turns(50)]
    run = Simulation(texts, 400, CURVES[name], AdaptiveController()).run()
    assert run.ends[0] <= 1.02 * best_fixed(texts, CURVES[name])
    assert max(run.slowdowns()) <= 1.03


@pytest.mark.parametrize("name", CURVES)
def test_neighbours_pay_nothing_for_one_that_repeats_itself(name: str) -> None:
    texts = [steady(0.97), *[steady(0.0)] * 7]
    run = Simulation(texts, 400, CURVES[name], AdaptiveController()).run()
    assert max(run.slowdowns()) <= 1.03


def test_eight_streams_that_repeat_themselves_all_gain() -> None:
    texts = [steady(0.95)] * 8
    run = Simulation(texts, 400, CURVES["cheap rows"], AdaptiveController()).run()
    assert max(run.slowdowns()) < 0.6
    assert max(run.ends) <= 1.10 * best_fixed(texts, CURVES["cheap rows"])
