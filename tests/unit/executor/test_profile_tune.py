"""Choosing kernels: the fastest by a clear margin, else the default; never beyond the budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from executor_service.engine.profile import StepShape
from executor_service.engine.profile_tune import ROWS, apply_choices, fastest, tune
from executor_service.engine.step_request import Limits
from isobatch_kernels.tuning import choice_for

LIMITS = Limits(
    max_num_seqs=256, max_num_batched_tokens=512, vocab_size=64, context_length=8192, max_top_k=8
)


@dataclass
class Machine:
    """A backend with two ways from 4 rows on, and steps on it; `fast` names the better one."""

    fast: Mapping[int, str]
    token_ns: int = 100
    now: int = 0
    chosen: list[dict[int, str]] = field(default_factory=list)
    runs: list[tuple[int, str]] = field(default_factory=list)
    no_room_for: int = 0
    fail_at: int = 0

    def choices(self, num_rows: int) -> Sequence[str]:
        return ("default", "other") if num_rows >= 4 else ("default",)

    def choose(self, choices: Mapping[int, str]) -> None:
        for rows, name in choices.items():
            if name not in self.choices(rows):
                raise ValueError(f"[machine] {name} is not known")
        self.chosen.append(dict(choices))

    def num_missing(self, shape: StepShape) -> int:
        return 0

    def take(self, shape: StepShape) -> bool:
        return shape.num_tokens != self.no_room_for

    def run(self, shape: StepShape) -> None:
        rows = shape.num_tokens
        if rows == self.fail_at:
            raise RuntimeError("a broken step")
        name = choice_for(self.chosen[-1] if self.chosen else {}, rows) or "default"
        self.runs.append((rows, name))
        is_fast = self.fast.get(rows, "default") == name
        self.now += rows * self.token_ns * (1 if is_fast else 2)

    def clock(self) -> int:
        return self.now


def test_the_faster_way_is_used_from_then_on() -> None:
    machine = Machine({6: "other", 64: "other"})
    found = tune(machine, machine, LIMITS, machine.clock)
    assert found == {
        rows: "other" if rows in machine.fast else "default" for rows in ROWS if rows >= 4
    }
    assert machine.chosen[-1] == found
    # After a step of one row, in turns.
    assert machine.runs[:5] == [(1, "default"), *[(4, "default"), (4, "other")] * 2]


def test_nothing_to_gain_leaves_the_defaults() -> None:
    machine = Machine({})
    assert tune(machine, machine, LIMITS, machine.clock) == {}
    assert machine.chosen[-1] == {}


def test_the_budget_leaves_larger_steps_alone() -> None:
    machine = Machine(dict.fromkeys(ROWS, "other"), token_ns=100_000)
    found = tune(machine, machine, LIMITS, machine.clock, budget_ns=100_000_000)
    assert machine.now <= 100_000_000
    assert next(iter(found)) == 4
    assert 64 not in found
    assert choice_for(found, 64) is None
    assert choice_for(found, 5) == "other"


def test_a_machine_too_slow_for_its_model_is_asked_for_one_step() -> None:
    machine = Machine(dict.fromkeys(ROWS, "other"), token_ns=200_000_000)
    assert tune(machine, machine, LIMITS, machine.clock) == {}
    assert machine.runs == [(1, "default")]


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        (Limits(8, 512, 64, 8192, 8), [4, 6, 8, 64, 128]),
        (Limits(256, 16, 64, 8192, 8), [4, 6, 8, 12, 16]),
        (Limits(256, 512, 64, 20, 8), [4, 6, 8, 12, 16]),
    ],
)
def test_limits(limits: Limits, rows: list[int]) -> None:
    machine = Machine(dict.fromkeys(ROWS, "other"))
    assert list(tune(machine, machine, limits, machine.clock)) == rows


def test_a_cache_without_room_ends_it() -> None:
    machine = Machine(dict.fromkeys(ROWS, "other"), no_room_for=8)
    assert list(tune(machine, machine, LIMITS, machine.clock)) == [4, 6]


def test_a_step_that_fails_leaves_the_defaults() -> None:
    machine = Machine({}, fail_at=8)
    with pytest.raises(RuntimeError, match="broken"):
        tune(machine, machine, LIMITS, machine.clock)
    assert machine.chosen[-2:] == [{8: "default"}, {}]


def test_a_backend_without_a_choice() -> None:
    machine = Machine({})
    assert tune(object(), machine, LIMITS, machine.clock) == {}
    assert machine.runs == []


@pytest.mark.parametrize(
    ("default", "other", "name"),
    [
        ([100, 100, 100], [95, 95, 95], "other"),
        ([100, 100, 100], [97, 97, 97], "default"),
        ([100, 100, 100], [80, 101, 101], "default"),
        # A better median by luck: at its best the default is faster.
        ([70, 100, 100], [75, 80, 80], "default"),
    ],
)
def test_only_a_clear_gain_counts(default: list[int], other: list[int], name: str) -> None:
    assert fastest({"default": default, "other": other}, "default") == name


def test_stored_choices_are_used_and_unknown_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine({})
    apply_choices(machine, {8: "other"})
    assert machine.chosen == [{8: "other"}]
    with caplog.at_level(logging.WARNING):
        apply_choices(machine, {8: "gone"})
    assert "choices of the stored profile are not known" in caplog.text
    assert len(machine.chosen) == 1
    apply_choices(object(), {8: "other"})
