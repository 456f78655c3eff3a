"""The one thread that touches MLX, the backend and the session: a bounded queue in, futures out.

Some work is begun and finished later: while the device computes it, the next work of that kind may
be begun. All other work waits until nothing is begun.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from executor_service.errors import DrainingError, EngineBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

# One session has few requests without an answer, so only fenced sessions can add to its own.
QUEUE_SIZE: Final = 64
MAX_BEGUN: Final = 2
"""Pieces of work that may be begun and not finished."""

# Of the time that work of the same size took last, how much may pass in waiting for the next: what
# comes later is begun when the device is idle. Well below 1, so that one slow step makes few late.
_PATIENCE: Final = 0.5


class Begun(Protocol[Result_co]):
    """Work that was begun."""

    @property
    def is_running(self) -> bool:
        """Whether it goes on by itself, so that there is time to wait for the next."""
        ...

    @property
    def size(self) -> int:
        """Work of one size takes about the same time."""
        ...

    def finish(self) -> Result_co:
        """Wait for its result."""
        ...


@dataclass(slots=True, eq=False)
class _Job(Generic[Result]):
    """Work in the queue: a callable, or one that begins something."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]
    run: Callable[[], Result] | None = None
    begin: Callable[[], Begun[Result]] | None = None
    begun: Begun[Result] | None = None
    begun_at: float = 0.0  # seconds of time.monotonic

    def deliver(self, work: Callable[[], Result]) -> None:
        """Do the work and settle the future with what comes of it."""
        try:
            result = work()
        except BaseException as error:  # whoever awaits decides
            _deliver(self.loop, self.future, error=error)
        else:
            _deliver(self.loop, self.future, result=result)


class EngineThread:
    """Runs callables one after the other, in the order in which they were given."""

    def __init__(self, queue_size: int = QUEUE_SIZE) -> None:
        # Its bound is kept by `submit`. It wakes its reader with one system call, where a Queue
        # with a bound of its own takes two locks and a condition variable.
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._queue_size = queue_size
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._last: Callable[[], None] | None = None
        # What the last begun work took, from when the device could begin it, and its size.
        self._last_seconds, self._last_size = 0.0, 0

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
        loop = asyncio.get_running_loop()
        return self._put(_Job(loop, loop.create_future(), run=work))

    def submit_begun(self, begin: Callable[[], Begun[Result]]) -> asyncio.Future[Result]:
        """Queue work that is begun, and finished later; otherwise as `submit`.

        What was begun is finished even if its future is cancelled.
        """
        loop = asyncio.get_running_loop()
        return self._put(_Job(loop, loop.create_future(), begin=begin))

    def _put(self, job: _Job[Result]) -> asyncio.Future[Result]:
        if self._is_stopping:
            raise DrainingError("[engine] no work is taken while the process stops, got a request")
        # Only the event loop's thread adds, so the number can only have shrunk since.
        if self._queue.qsize() >= self._queue_size:
            raise EngineBusyError(
                f"[engine] at most {self._queue_size} requests may wait, got one more"
            )
        self._queue.put(job)
        return job.future

    def stop(self, last: Callable[[], None] | None = None) -> None:
        """Finish what is queued, run `last`, and join the thread; blocks."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._last = last
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        begun: deque[_Job[Any]] = deque()
        # Taken from the queue while something is begun, and to be done after it.
        following: _Job[Any] | None = None
        is_stopping = False
        while True:
            if following is None and not is_stopping:
                try:
                    following = self._next(begun)
                    is_stopping = following is None
                except queue.Empty:
                    pass
            if following is not None and following.begin is not None and len(begun) < MAX_BEGUN:
                self._begin(following, begun)
                following = None
            elif begun:
                self._finish(begun)
            elif following is not None:
                if following.run is not None and not following.future.cancelled():
                    following.deliver(following.run)
                # An idle thread must not keep the last step's arrays alive.
                following = None
            elif is_stopping:
                break
        if self._last is not None:
            self._last()

    def _next(self, begun: deque[_Job[Any]]) -> _Job[Any] | None:
        """Return the next job, None to stop; raises queue.Empty where it does not pay to wait."""
        if not begun:
            return self._queue.get()
        first = begun[0]
        work = first.begun
        if work is None or not work.is_running or work.size != self._last_size:
            return self._queue.get_nowait()
        seconds = first.begun_at + _PATIENCE * self._last_seconds - time.monotonic()
        if seconds <= 0:
            return self._queue.get_nowait()
        return self._queue.get(timeout=seconds)

    def _begin(self, job: _Job[Any], begun: deque[_Job[Any]]) -> None:
        if job.begin is None or job.future.cancelled():
            return
        job.begun_at = time.monotonic()
        try:
            job.begun = job.begin()
        except BaseException as error:  # whoever awaits decides
            _deliver(job.loop, job.future, error=error)
        else:
            begun.append(job)

    def _finish(self, begun: deque[_Job[Any]]) -> None:
        job = begun.popleft()
        if job.begun is None:
            raise AssertionError("[engine] work must be begun before it is finished")
        job.deliver(job.begun.finish)
        now = time.monotonic()
        self._last_seconds, self._last_size = now - job.begun_at, job.begun.size
        if begun:
            # The device has begun it now.
            begun[0].begun_at = now


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
