"""Compares the speed of a few decode steps with the profile.

A graphics processor that the system slows down, a machine that is too hot or a program that takes
its processors shows as a ratio far below 1. On a Mac the usual cause is a launchd job without the
right ProcessType: 11 tokens a second were seen instead of 87.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor_service.engine.profile import StepShape
from executor_service.engine.profile_steps import ScratchSteps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.profile import Profile
    from executor_service.engine.profile_steps import Clock
    from executor_service.engine.step_request import Limits
    from executor_service.kv_cache.manager import KvCacheManager

ROWS: Final = (1, 8)
REPEATS: Final = 5
# Below this share of the stored speed something is wrong with the machine.
SLOW: Final = 0.5
# Above this one the profile was measured while something else ran.
STALE: Final = 2.0


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """Throughput now over that of the profile, by rows."""

    # From the best repeat: what slows the machine for good slows each of them.
    ratios: Mapping[int, float]
    # From the median repeat.
    median_ratios: Mapping[int, float]

    @property
    def ratio(self) -> float:
        """The least ratio."""
        return min(self.ratios.values())

    @property
    def is_slow(self) -> bool:
        """Whether the machine is far below its profile."""
        return self.ratio < SLOW

    @property
    def is_stale(self) -> bool:
        """Whether the profile says far less than what the machine does."""
        return min(self.median_ratios.values()) > STALE


class SpeedCheck:
    """Times single steps between those of others; used on the engine thread.

    Each call takes blocks, computes one step and gives them back, so that whoever comes meanwhile
    waits for one step at most.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KvCacheManager,
        limits: Limits,
        profile: Profile,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._limits = limits
        self._clock = clock
        points = (profile.find(StepShape(rows, rows)) for rows in ROWS)
        self._stored_ns = {
            point.shape: point.median_ns for point in points if point and point.median_ns > 0
        }

    @property
    def steps(self) -> Sequence[StepShape]:
        """The steps of a check in their order: in turns, the first ones of each size untimed."""
        return list(self._stored_ns) * (REPEATS + 1)

    def time_step(self, shape: StepShape) -> int | None:
        """Return the nanoseconds of a step; None, with nothing done, unless the cache is idle.

        Idle means no open sequence. Where no block is free, a few cached ones that were used least
        recently make room, once: they are free afterwards.
        """
        if self._cache.num_sequences:
            return None
        with ScratchSteps(self._runner, self._cache, self._limits) as steps:
            if not steps.take(shape):
                return None
            begin = self._clock()
            steps.run(shape)
            return self._clock() - begin

    def result(self, timed: Sequence[tuple[StepShape, int]]) -> SpeedResult | None:
        """Compare the nanoseconds of `steps` with the profile; None where it has none of them."""
        best: dict[int, float] = {}
        median: dict[int, float] = {}
        for shape, stored in self._stored_ns.items():
            found = [max(1, each) for other, each in timed if other == shape][1:]
            if found:
                best[shape.num_rows] = stored / min(found)
                median[shape.num_rows] = stored / statistics.median(found)
        return SpeedResult(best, median) if best else None

    def run(self) -> SpeedResult | None:
        """Do a whole check at once; None unless the cache is idle and the profile has points."""
        timed = []
        for shape in self.steps:
            nanoseconds = self.time_step(shape)
            if nanoseconds is None:
                return None
            timed.append((shape, nanoseconds))
        return self.result(timed)


def likely_cause(unit: str, platform: str = sys.platform) -> str:
    """Return, in words, what probably slows a machine that is far below its profile."""
    if platform == "darwin" and unit == "metal":
        return (
            "The system slows the GPU down: a launchd job needs ProcessType Interactive, which "
            "`isobatch service install` sets (11 instead of 87 tokens a second were seen); also "
            "low power mode or heat."
        )
    if unit in ("metal", "cuda"):
        return "The GPU is throttled (power limit, heat), or another program uses it."
    return "The processor is throttled (heat, power saving), or other programs use it."
