"""Checks the executor's speed against its profile: soon after its start, then hourly, when idle."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from executor_service import logs
from executor_service.engine.speed_check import likely_cause
from executor_service.errors import DrainingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from executor_service.engine.engine import Engine
    from executor_service.engine.profile import StepShape
    from executor_service.engine.speed_check import SpeedResult
    from executor_service.host import Host
    from executor_service.metrics import Metrics

INTERVAL_SECONDS: Final = 3600.0
# How long a session must have asked nothing, and how often that is looked at when a check is due.
QUIET_SECONDS: Final = 2.0
_LOG = logs.get_logger(__name__)


class SpeedWatch:
    """Runs as a task on the event loop; steps run on the engine thread, one at a time."""

    def __init__(
        self,
        host: Host,
        engine: Engine,
        metrics: Metrics,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._host = host
        self._engine = engine
        self._metrics = metrics
        self._sleep = sleep

    async def run(self) -> None:
        """Check for ever; returns at once without a profile, or when the process stops."""
        if not self._engine.speed.steps:
            return
        while True:
            # Who starts a service has a question for it.
            await self._sleep(QUIET_SECONDS)
            try:
                result = await self._check()
            except DrainingError:
                return
            except Exception as error:
                _LOG.warning("speed cannot be checked", error=f"{type(error).__name__}: {error}")
                result = None
            if result is not None:
                self._report(result)
                await self._sleep(INTERVAL_SECONDS)

    def _is_quiet(self) -> bool:
        live = self._host.gate.live
        return live is None or time.monotonic() - live.last_request >= QUIET_SECONDS

    async def _check(self) -> SpeedResult | None:
        """Return a result; None where somebody came meanwhile."""
        speed = self._engine.speed
        timed: list[tuple[StepShape, int]] = []
        for shape in speed.steps:
            if not self._is_quiet():
                return None
            nanoseconds = await self._host.run(lambda each=shape: speed.time_step(each))  # type: ignore[misc]
            if nanoseconds is None:
                return None
            timed.append((shape, nanoseconds))
        return speed.result(timed)

    def _report(self, result: SpeedResult) -> None:
        self._metrics.profile.observe_speed(result, time.time())
        ratios = {f"rows_{rows}": round(ratio, 2) for rows, ratio in result.ratios.items()}
        if result.is_slow:
            cause = likely_cause(self._engine.capabilities.build.unit)
            _LOG.warning("steps are far slower than the stored profile", **ratios, cause=cause)
        else:
            _LOG.info("speed checked against the profile", **ratios)
        if result.is_stale:
            _LOG.info("the profile was measured on a busy machine; the next start measures again")
            self._engine.profile_file.unlink(missing_ok=True)
