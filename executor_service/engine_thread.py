"""The one thread that touches MLX, the backend and the session: a bounded queue in, futures out."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from executor_service.errors import DrainingError, EngineBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

# One session waits for each of its answers, so only fenced sessions can add to its request.
QUEUE_SIZE: Final = 64


class EngineThread:
    """Runs callables one after the other, in the order in which they were given."""

    def __init__(self, queue_size: int = QUEUE_SIZE) -> None:
        # Its bound is kept by `submit`. It wakes its reader with one system call, where a Queue
        # with a bound of its own takes two locks and a condition variable.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queue_size = queue_size
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue work and return its future; call it on the event loop.

        Work whose future is cancelled before its turn is left out. Raises EngineBusyError when the
        queue is full, DrainingError once the thread is to stop.
        """
        if self._is_stopping:
            raise DrainingError("[engine] no work is taken while the process stops, got a request")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = work()
            except BaseException as error:  # whoever awaits decides
                _deliver(loop, future, error=error)
            else:
                _deliver(loop, future, result=result)

        # Only the event loop's thread adds, so the number can only have shrunk since.
        if self._queue.qsize() >= self._queue_size:
            raise EngineBusyError(
                f"[engine] at most {self._queue_size} requests may wait, got one more"
            )
        self._queue.put(job)
        return future

    def stop(self, last: Callable[[], None] | None = None) -> None:
        """Finish what is queued, run `last`, and join the thread; blocks."""
        self._is_stopping = True
        if self._thread.is_alive():
            if last is not None:
                self._queue.put(last)
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            # An idle thread must not keep the last step's arrays alive.
            del job


def _deliver(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    *,
    result: object = None,
    error: BaseException | None = None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    # The loop is closed when the process stops in the middle of a step: nobody waits then.
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
