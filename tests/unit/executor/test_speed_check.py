"""The speed check: ratios against the profile, only on an idle cache, with nothing left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.profile import DecodeCost, Profile, StepShape
from executor_service.engine.speed_check import REPEATS, SpeedCheck, SpeedResult, likely_cause
from executor_service.engine.step_request import Limits
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.manager import KvCacheManager, KvOccupancy
from executor_service.kv_cache.prefix_index import PrefixIndex
from executor_service.profile_metrics import ProfileMetrics
from tests.support.fake_backend import FakeBackend
from tests.support.profiles import profile_of
from tests.support.steps import Row, step_request

LIMITS = Limits(8, 16, 64, 128, 4)


PROFILE = profile_of((1, 1, 0, 1000), (8, 8, 0, 4000))


@dataclass
class Executor:
    """A check over a toy backend whose steps take what `costs` says, one after the other."""

    costs: list[int]
    profile: Profile = PROFILE
    num_blocks: int = 8
    backend: FakeBackend = field(init=False)
    cache: KvCacheManager = field(init=False)
    check: SpeedCheck = field(init=False)
    now: int = 0

    def __post_init__(self) -> None:
        self.backend = FakeBackend(self.num_blocks)
        self.cache = KvCacheManager(self.num_blocks, 16, self.backend.zero_blocks)
        run = self.backend.run

        def timed(step: Any) -> Any:
            self.now += self.costs.pop(0)
            return run(step)

        self.backend.run = timed  # type: ignore[method-assign]
        runner = ModelRunner((), self.backend)
        self.check = SpeedCheck(runner, self.cache, LIMITS, self.profile, lambda: self.now)


def test_ratios_of_the_best_and_of_the_median() -> None:
    # In turns: one row, eight rows. The first pair is not counted.
    one, eight = (10, 4000, 2000, 2500, 9000, 2000), (10, 8000, 9000, 9000, 16000, 10000)
    executor = Executor([cost for pair in zip(one, eight, strict=True) for cost in pair])
    assert len(executor.check.steps) == 2 * (REPEATS + 1)
    result = executor.check.run()
    assert result == SpeedResult({1: 0.5, 8: 0.5}, {1: 0.4, 8: 4000 / 9000})
    assert not result.is_slow
    assert executor.cache.num_sequences == 0
    assert executor.cache.occupancy().free_blocks == 8
    assert executor.backend.num_runs == 12


@pytest.mark.parametrize(
    ("ratios", "medians", "is_slow", "is_stale"),
    [
        ({1: 0.49, 8: 1.0}, {1: 0.4, 8: 1.0}, True, False),
        ({1: 1.0, 8: 0.5}, {1: 1.0, 8: 0.5}, False, False),
        ({1: 3.0, 8: 3.0}, {1: 2.1, 8: 2.1}, False, True),
        ({1: 3.0, 8: 3.0}, {1: 2.1, 8: 1.9}, False, False),
    ],
)
def test_slow_and_stale(
    ratios: dict[int, float], medians: dict[int, float], is_slow: bool, is_stale: bool
) -> None:
    result = SpeedResult(ratios, medians)
    assert (result.is_slow, result.is_stale) == (is_slow, is_stale)


def test_an_open_sequence_ends_a_check() -> None:
    executor = Executor([1000] * 12)
    assert executor.check.time_step(StepShape(1, 1)) == 1000
    executor.cache.open(5)
    assert executor.check.time_step(StepShape(1, 1)) is None
    assert executor.check.run() is None
    assert executor.backend.num_runs == 1
    executor.cache.release([5])
    assert executor.check.time_step(StepShape(8, 8)) == 1000


def test_a_cache_without_room_is_left_alone() -> None:
    executor = Executor([1000] * 12, num_blocks=7)
    assert executor.check.time_step(StepShape(8, 8)) is None
    assert executor.check.run() is None


def test_cached_prefixes_make_room_for_a_check_once() -> None:
    executor = Executor([1000] * 24)
    index = PrefixIndex(Chains(CacheIdentity("X1", "f16", "weights", "config", 16)))
    cache = KvCacheManager(10, 16, executor.backend.zero_blocks, index)
    executor.backend.cache = np.zeros((10, 16), np.int32)
    runner = ModelRunner((), executor.backend)
    check = SpeedCheck(runner, cache, LIMITS, PROFILE, lambda: executor.now)
    cache.open(3)
    assert cache.grow({3: 160})
    cache.written(3, 0, np.arange(160, dtype=np.int32).tobytes(), 160)
    cache.release([3])
    assert cache.occupancy() == KvOccupancy(10, 0, 10, 0)
    for _ in range(2):
        assert check.run() is not None
        assert cache.occupancy() == KvOccupancy(10, 8, 2, 0)
    assert index.counts.evictions == 8


@pytest.mark.parametrize(
    ("profile", "num_steps"),
    [(Profile(), 0), (profile_of((2, 2, 0, 5)), 0), (profile_of((1, 1, 0, 5)), REPEATS + 1)],
)
def test_only_what_the_profile_has_is_checked(profile: Profile, num_steps: int) -> None:
    executor = Executor([5] * num_steps, profile)
    assert len(executor.check.steps) == num_steps
    result = executor.check.run()
    assert result == (SpeedResult({1: 1.0}, {1: 1.0}) if num_steps else None)


@pytest.mark.parametrize(
    ("unit", "platform", "words"),
    [("metal", "darwin", "ProcessType"), ("cuda", "linux", "GPU"), ("vnni", "linux", "processor")],
)
def test_the_likely_cause(unit: str, platform: str, words: str) -> None:
    assert words in likely_cause(unit, platform)


def test_expected_time_of_decode_steps() -> None:
    cost = DecodeCost(
        profile_of((1, 1, 0, 100), (2, 2, 0, 120), (4, 4, 0, 200), (1, 1, 512, 612),
                 (4, 4, 512, 712), (1, 64, 0, 900))
    )  # fmt: skip
    # Behind a context: 512 and 512 more over 512 and 2,048 positions.
    each = 1024 / 2560
    assert [cost.expected_ns(rows, 0) for rows in (1, 2, 3, 4, 6)] == [100, 120, 160, 200, 280]
    assert cost.expected_ns(3, 100) == 160 + 100 * each
    assert DecodeCost(profile_of((1, 1, 0, 100))).expected_ns(3, 7) == 300
    assert DecodeCost(Profile()).expected_ns(3, 7) == 0


@pytest.fixture
def page() -> tuple[ProfileMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    profile = profile_of((1, 1, 0, 1000), (2, 2, 0, 3000), (1, 16, 0, 9000))
    return ProfileMetrics(registry, "toy", profile), registry


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"isobatch_executor_{name}", {"model": "toy"} | labels)


def test_the_curve_as_gauges(page: tuple[ProfileMetrics, CollectorRegistry]) -> None:
    _, registry = page
    for phase, tokens, seconds in (
        ("decode", "1", 1e-6), ("prefill", "1", 1e-6), ("decode", "2", 3e-6),
        ("prefill", "16", 9e-6), ("prefill", "2", None), ("decode", "16", None),
    ):  # fmt: skip
        found = _value(registry, "cost_seconds", phase=phase, tokens=tokens, context="0")
        assert found == (None if seconds is None else pytest.approx(seconds))
    assert _value(registry, "profile_info", origin="measured") == 1
    assert _value(registry, "profile_info", origin="off") == 0
    assert _value(registry, "profile_measured_timestamp_seconds") == 77


@pytest.mark.parametrize(("rows", "label"), [(1, "1"), (3, "4"), (256, "256"), (257, "more")])
def test_decode_steps_are_counted_by_rows(
    page: tuple[ProfileMetrics, CollectorRegistry], rows: int, label: str
) -> None:
    metrics, registry = page
    request = step_request(1, [Row(index, (5,)) for index in range(rows)])
    metrics.observe_decode(request, 2_000)
    assert _value(registry, "decode_steps_total", rows=label) == 1
    assert _value(registry, "decode_seconds_total", rows=label) == pytest.approx(2e-6)
    expected = _value(registry, "decode_expected_seconds_total", rows=label)
    assert expected == pytest.approx(1e-6 * (1 + 2 * (rows - 1)))


def test_a_check_is_shown(page: tuple[ProfileMetrics, CollectorRegistry]) -> None:
    metrics, registry = page
    assert _value(registry, "speed_ratio", rows="8") == 1
    assert _value(registry, "speed_check_timestamp_seconds") == 0
    metrics.observe_speed(SpeedResult({8: 0.25}, {8: 0.2}), 1234.5)
    assert _value(registry, "speed_ratio", rows="8") == 0.25
    assert _value(registry, "speed_ratio", rows="1") == 1
    assert _value(registry, "speed_check_timestamp_seconds") == 1234.5
