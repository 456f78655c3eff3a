"""The running executor as its servicer sees it: an engine that may still be loading."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeVar

from executor_service.errors import DrainingError, NotReadyError
from executor_service.session_gate import SessionGate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from executor_service.config import ExecutorConfig
    from executor_service.engine.engine import Engine
    from executor_service.engine_thread import Begun, EngineThread
    from executor_service.metrics import Metrics

Result = TypeVar("Result")


class Host:
    """What the process holds. Used on the event loop; the engine itself on its thread."""

    def __init__(self, config: ExecutorConfig, thread: EngineThread) -> None:
        self.config = config
        # A change of this number tells schedulers that all cached state is gone.
        self.executor_epoch = secrets.randbits(63) | 1
        self.gate = SessionGate()
        self.is_draining = False
        self._thread = thread
        self._engine: Engine | None = None
        self._metrics: Metrics | None = None

    @property
    def is_ready(self) -> bool:
        """True once steps run."""
        return self._engine is not None and not self.is_draining

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReadyError while it is loading."""
        if self._engine is None:
            raise NotReadyError("[executor] the model must be loaded first, got a request before")
        return self._engine

    @property
    def metrics(self) -> Metrics:
        """The metrics; raises NotReadyError while the model is loading."""
        if self._metrics is None:
            raise NotReadyError("[executor] the model must be loaded first, got a request before")
        return self._metrics

    def set_ready(self, engine: Engine, metrics: Metrics) -> None:
        """Begin to serve."""
        self._engine, self._metrics = engine, metrics

    def refuse_when_draining(self) -> None:
        """Raise DrainingError once the process is to stop."""
        if self.is_draining:
            raise DrainingError("[executor] no session starts while it stops, got a new one")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work on the engine thread and return its result."""
        return await self._thread.submit(work)

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue work for the engine thread."""
        return self._thread.submit(work)

    def submit_begun(self, begin: Callable[[], Begun[Result]]) -> asyncio.Future[Result]:
        """Queue work that is begun and finished later."""
        return self._thread.submit_begun(begin)
