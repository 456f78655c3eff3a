"""The engine thread: order, results, errors, bounds, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from executor_service.engine_thread import EngineThread
from executor_service.errors import DrainingError, EngineBusyError


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    engine = EngineThread(queue_size=4)
    engine.start()
    yield engine
    engine.stop()


async def test_work_runs_in_order_on_one_other_thread(thread: EngineThread) -> None:
    seen: list[tuple[int, int]] = []

    def work(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return number * 2

    futures = [thread.submit(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    assert await asyncio.gather(*futures) == [0, 2, 4, 6]
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})
    assert len({ident for _, ident in seen}) == 1


async def test_errors_reach_the_caller_and_not_the_thread(thread: EngineThread) -> None:
    def fail() -> None:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        await thread.submit(fail)
    assert await thread.submit(lambda: 1) == 1


async def test_the_queue_is_bounded_and_cancelled_work_is_left_out(thread: EngineThread) -> None:
    gate, started, ran = threading.Event(), threading.Event(), []

    def block() -> None:
        started.set()
        gate.wait()

    blocker = thread.submit(block)
    await asyncio.to_thread(started.wait)
    waiting = [thread.submit(lambda number=n: ran.append(number)) for n in range(4)]  # type: ignore[misc]
    with pytest.raises(EngineBusyError, match="at most 4 requests may wait"):
        thread.submit(lambda: None)
    waiting[1].cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(blocker, *waiting, return_exceptions=True)
    assert ran == [0, 2, 3]


async def test_stopping_finishes_what_is_queued() -> None:
    engine = EngineThread()
    engine.start()
    order: list[str] = []
    future = engine.submit(lambda: order.append("work"))
    await asyncio.to_thread(engine.stop, lambda: order.append("last"))
    await future
    assert order == ["work", "last"]
    with pytest.raises(DrainingError):
        engine.submit(lambda: None)
