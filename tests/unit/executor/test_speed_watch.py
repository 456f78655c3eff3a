"""The watch: checks when nobody asks, reports, waits an hour, and never stands in anybody's way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor_service.engine.profile import StepShape
from executor_service.engine.speed_check import SpeedResult
from executor_service.errors import DrainingError
from executor_service.speed_watch import INTERVAL_SECONDS, QUIET_SECONDS, SpeedWatch

SHAPES = [StepShape(1, 1), StepShape(8, 8)]
GOOD = SpeedResult({1: 1.0, 8: 0.9}, {1: 1.0, 8: 0.9})


@dataclass
class World:
    """A host, an engine and metrics that remember what was asked of them."""

    profile_file: Path
    results: list[SpeedResult] = field(default_factory=lambda: [GOOD])
    steps: Sequence[StepShape] = field(default_factory=lambda: list(SHAPES))
    slept: list[float] = field(default_factory=list)
    shown: list[SpeedResult] = field(default_factory=list)
    timed: list[StepShape] = field(default_factory=list)
    before_step: Callable[[], object] = lambda: None
    live: Any = None

    async def run(self, work: Callable[[], Any]) -> Any:
        self.before_step()
        return work()

    def time_step(self, shape: StepShape) -> int | None:
        self.timed.append(shape)
        return 7

    def result(self, timed: Sequence[tuple[StepShape, int]]) -> SpeedResult:
        assert timed == [(shape, 7) for shape in SHAPES]
        return self.results.pop(0)

    def observe_speed(self, result: SpeedResult, now: float) -> None:
        assert now > 1_600_000_000
        self.shown.append(result)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) > 5:
            raise asyncio.CancelledError

    async def watch(self) -> None:
        engine: Any = SimpleNamespace(
            speed=self,
            capabilities=SimpleNamespace(build=SimpleNamespace(unit="vnni")),
            profile_file=self.profile_file,
        )
        host: Any = SimpleNamespace(gate=self, run=self.run)
        metrics: Any = SimpleNamespace(profile=self)
        await SpeedWatch(host, engine, metrics, self.sleep).run()


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "profile.json").write_text("{}")
    return World(tmp_path / "profile.json")


async def test_a_check_soon_and_then_every_hour(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.results = [GOOD, GOOD, GOOD]
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await world.watch()
    assert world.slept == [QUIET_SECONDS, INTERVAL_SECONDS] * 3
    assert world.shown == [GOOD] * 3
    assert world.timed == SHAPES * 3
    assert "speed checked against the profile" in caplog.text
    assert world.profile_file.exists()


async def test_without_a_profile_there_is_nothing_to_watch(world: World) -> None:
    world.steps = []
    await world.watch()
    assert world.slept == []


async def test_a_slow_machine_is_a_warning_that_names_the_cause(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.results = [SpeedResult({1: 0.13, 8: 0.6}, {1: 0.13, 8: 0.6})] * 3
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await world.watch()
    assert "far slower than the stored profile" in caplog.text
    assert world.profile_file.exists()


async def test_a_profile_of_a_busy_machine_is_thrown_away(world: World) -> None:
    world.results = [SpeedResult({1: 4.0, 8: 4.0}, {1: 3.0, 8: 3.0})] * 3
    with pytest.raises(asyncio.CancelledError):
        await world.watch()
    assert not world.profile_file.exists()


async def test_a_request_ends_a_check_and_quiet_begins_it_anew(world: World) -> None:
    def somebody_comes() -> None:
        world.live = SimpleNamespace(last_request=time.monotonic() + 3600)

    world.before_step = somebody_comes
    with pytest.raises(asyncio.CancelledError):
        await world.watch()
    assert world.timed == SHAPES[:1]
    assert world.shown == []
    assert world.slept == [QUIET_SECONDS] * 6


async def test_a_quiet_session_is_no_obstacle(world: World) -> None:
    world.live = SimpleNamespace(last_request=time.monotonic() - QUIET_SECONDS)
    world.results = [GOOD] * 3
    with pytest.raises(asyncio.CancelledError):
        await world.watch()
    assert world.shown == [GOOD] * 3


async def test_the_watch_ends_with_the_process_and_outlives_a_failure(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [RuntimeError("a broken step"), DrainingError("stopping")]

    def fail() -> None:
        raise failures.pop(0)

    world.before_step = fail
    with caplog.at_level(logging.WARNING):
        await world.watch()
    assert "speed cannot be checked" in caplog.text
    assert world.slept == [QUIET_SECONDS] * 2
