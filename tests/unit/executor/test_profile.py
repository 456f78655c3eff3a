"""The profile: monotone curves, shapes within limits, time within a budget, nothing left behind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.profile import CostPoint, Profile, StepShape, monotone, monotone_fit
from executor_service.engine.profile_measure import (
    MAX_REPEATS,
    measure,
    shapes,
    time_interleaved,
)
from executor_service.engine.profile_steps import ScratchSteps
from executor_service.engine.step_request import Limits
from executor_service.errors import LogitsNotKeptError
from executor_service.kv_cache.manager import KvCacheManager
from tests.support.fake_backend import FakeBackend

LIMITS = Limits(
    max_num_seqs=256, max_num_batched_tokens=512, vocab_size=64, context_length=8192, max_top_k=8
)
ROOM = 10**5  # blocks


def _point(rows: int, tokens: int, context: int, median: int, repeats: int = 1) -> CostPoint:
    return CostPoint(StepShape(rows, tokens, context), median, repeats, median)


@pytest.mark.parametrize(
    ("values", "weights", "fitted"),
    [
        ([], [], []),
        ([1, 2, 3], [1, 1, 1], [1, 2, 3]),
        ([3, 1], [1, 1], [2, 2]),
        ([3, 1], [3, 1], [2.5, 2.5]),
        ([1, 9, 2, 4, 8], [1, 1, 1, 1, 1], [1, 5, 5, 5, 8]),
    ],
)
def test_the_monotone_fit_shares_a_spike_with_its_neighbours(
    values: list[float], weights: list[float], fitted: list[float]
) -> None:
    assert monotone_fit(values, weights) == fitted


def test_a_curve_never_falls_with_tokens_or_context_and_keeps_its_medians() -> None:
    measured = [
        _point(4, 4, 0, 50), _point(1, 1, 0, 60), _point(8, 8, 0, 100),
        _point(1, 1, 512, 40), _point(4, 4, 512, 70),
        _point(1, 64, 0, 30), _point(1, 128, 0, 200), _point(1, 128, 512, 150),
    ]  # fmt: skip
    points = monotone(measured)
    assert {point.shape: point.median_ns for point in points} == {
        point.shape: point.median_ns for point in measured
    }
    assert [(p.shape.num_rows, p.shape.num_tokens, p.duration_ns) for p in points] == [
        (1, 1, 55), (4, 4, 55), (8, 8, 100), (1, 1, 55), (4, 4, 70),
        (1, 64, 55), (1, 128, 200), (1, 128, 200),
    ]  # fmt: skip
    assert Profile(points=points).find(StepShape(4, 4, 512)) == points[4]
    assert Profile(points=points).find(StepShape(2, 2)) is None


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        (LIMITS, ROOM),
        (LIMITS, 7),
        (Limits(3, 8, 50, 20, 4), ROOM),
        (Limits(1, 1, 50, 1, 4), 1),
        (Limits(64, 32, 50, 600, 4), ROOM),
    ],
)
def test_shapes_stay_within_the_limits(limits: Limits, room: int) -> None:
    found = shapes(limits, room, 16)
    assert found[0] == StepShape(1, 1)
    assert len(set(found)) == len(found)
    for shape in found:
        assert shape.num_rows <= limits.max_num_seqs
        assert shape.num_tokens <= limits.max_num_batched_tokens
        assert shape.context_length + shape.tokens_per_row <= limits.context_length
        assert shape.num_rows * -(-(shape.context_length + shape.tokens_per_row) // 16) <= room


def test_the_usual_shapes() -> None:
    found = set(shapes(LIMITS, ROOM, 16))
    decode = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
    assert {StepShape(rows, rows) for rows in decode} <= found
    assert {StepShape(1, tokens) for tokens in (16, 32, 64, 128, 256, 512)} <= found
    assert {StepShape(4, 4, 512), StepShape(1, 1, 2048), StepShape(1, 128, 512)} <= found


@dataclass
class FakeSteps:
    """Steps that take `each_ns` a token and blocks that take `block_ns`, on their own clock."""

    each_ns: int
    block_ns: int = 0
    now: int = 0
    runs: list[StepShape] = field(default_factory=list)
    taken: set[StepShape] = field(default_factory=set)
    no_room_for: StepShape | None = None

    def clock(self) -> int:
        return self.now

    def num_missing(self, shape: StepShape) -> int:
        return 0 if shape in self.taken else shape.num_rows

    def take(self, shape: StepShape) -> bool:
        if shape == self.no_room_for:
            return False
        self.now += self.block_ns * self.num_missing(shape)
        self.taken.add(shape)
        return True

    def run(self, shape: StepShape) -> None:
        assert shape in self.taken
        self.runs.append(shape)
        self.now += self.each_ns * shape.num_tokens


def test_a_fast_machine_times_every_shape_in_turns() -> None:
    steps, wanted = FakeSteps(each_ns=1), shapes(LIMITS, ROOM, 16)
    durations = time_interleaved(steps, wanted, 10**9, steps.clock)
    assert durations == {shape: [shape.num_tokens] * MAX_REPEATS for shape in wanted}
    # Once untimed and once timed, then in turns.
    first = [shape for shape in wanted for _ in range(2)]
    assert steps.runs == first + wanted * (MAX_REPEATS - 1)


@pytest.mark.parametrize("each_ns", [10_000, 300_000, 10_000_000])
@pytest.mark.parametrize("block_ns", [0, 1_000_000])
def test_the_budget_bounds_the_time(each_ns: int, block_ns: int) -> None:
    budget = 1_000_000_000
    steps, wanted = FakeSteps(each_ns, block_ns), shapes(LIMITS, ROOM, 16)
    durations = time_interleaved(steps, wanted, budget, steps.clock)
    assert steps.now <= budget
    assert StepShape(1, 1) in durations
    assert StepShape(8, 8) in durations
    assert (len(durations) == len(wanted)) == (each_ns < 10_000_000)


def test_a_machine_too_slow_for_the_budget_times_one_row() -> None:
    steps = FakeSteps(each_ns=10**10)
    durations = time_interleaved(steps, shapes(LIMITS, ROOM, 16), 10**9, steps.clock)
    assert durations == {StepShape(1, 1): [10**10]}
    assert len(steps.runs) == 1


def test_a_shape_without_room_is_left_out() -> None:
    steps = FakeSteps(each_ns=1, no_room_for=StepShape(16, 16))
    durations = time_interleaved(steps, shapes(LIMITS, ROOM, 16), 10**9, steps.clock)
    assert StepShape(16, 16) not in durations
    assert StepShape(32, 32) in durations


@dataclass
class Engine:
    """A runner and a cache over a toy backend."""

    num_blocks: int
    backend: FakeBackend = field(init=False)
    cache: KvCacheManager = field(init=False)
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        self.backend = FakeBackend(self.num_blocks)
        self.cache = KvCacheManager(self.num_blocks, 16, self.backend.zero_blocks)
        self.runner = ModelRunner((), self.backend)


@pytest.mark.parametrize("num_blocks", [1, 3, 40])
def test_measuring_leaves_nothing_behind(num_blocks: int) -> None:
    engine = Engine(num_blocks)
    ticks = itertools.count(step=1000)
    # A context of a toy backend must have been written: only shapes without one.
    limits = Limits(8, 40, 64, 512, 4)
    profile = measure(engine.runner, engine.cache, limits, clock=lambda: next(ticks))
    points = profile.points
    assert profile.choices == ()
    found, wanted = {point.shape for point in points}, set(shapes(limits, num_blocks, 16))
    # A small pool may hold each shape, and not all of them one after the other.
    assert StepShape(1, 1) in found <= wanted
    assert found == wanted or num_blocks == 3
    assert all(point.num_repeats == MAX_REPEATS for point in points)
    assert engine.cache.num_sequences == 0
    assert engine.cache.occupancy().free_blocks == num_blocks
    engine.cache.check_integrity()
    with pytest.raises(LogitsNotKeptError):
        engine.runner.logits(1, np.zeros(0, np.int32), 0)


def test_scratch_steps_hold_blocks_once_and_give_them_back_after_an_error() -> None:
    engine = Engine(20)
    with ScratchSteps(engine.runner, engine.cache, LIMITS) as steps:
        assert steps.num_missing(StepShape(4, 4)) == 4
        assert steps.take(StepShape(4, 4))
        assert steps.num_missing(StepShape(4, 4)) == 0
        assert steps.num_missing(StepShape(1, 40)) == 2
        assert not steps.take(StepShape(1, 512))
        assert engine.cache.occupancy().free_blocks == 16
        engine.backend.fail_next = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            steps.run(StepShape(4, 4))
    assert engine.cache.occupancy().free_blocks == 20


def test_scratch_steps_need_a_cache_without_sequences() -> None:
    engine = Engine(4)
    engine.cache.open(7)
    with (
        pytest.raises(AssertionError, match="no open sequence"),
        ScratchSteps(engine.runner, engine.cache, LIMITS),
    ):
        pass
