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


class _Begun:
    """Work that notes when it is begun and finished; a running one needs nobody's help."""

    size = 1

    def __init__(self, name: str, log: list[str], *, is_running: bool, fails: bool = False) -> None:
        self.is_running = is_running
        self._name, self._log, self._fails = name, log, fails

    def begin(self) -> _Begun:
        self._log.append(f"begin {self._name}")
        return self

    def finish(self) -> str:
        self._log.append(f"finish {self._name}")
        if self._fails:
            raise KeyError(self._name)
        return self._name


@pytest.mark.parametrize("is_running", [True, False])
async def test_queued_work_is_begun_before_the_last_is_finished(is_running: bool) -> None:
    """Two at most, and other work waits until nothing is begun."""
    engine, log = EngineThread(), list[str]()
    works = [_Begun(name, log, is_running=is_running) for name in "abc"]
    begun = [engine.submit_begun(work.begin) for work in works]
    other = engine.submit(lambda: log.append("other"))
    last = engine.submit_begun(_Begun("d", log, is_running=is_running).begin)
    engine.start()
    assert await asyncio.gather(*begun, last) == ["a", "b", "c", "d"]
    await other
    await asyncio.to_thread(engine.stop)
    assert log == [
        "begin a", "begin b", "finish a", "begin c", "finish b", "finish c", "other",
        "begin d", "finish d",
    ]  # fmt: skip


async def test_begun_work_that_fails_fails_alone_and_cancelled_work_is_not_begun() -> None:
    engine, log = EngineThread(), list[str]()
    failing = engine.submit_begun(_Begun("a", log, is_running=True, fails=True).begin)
    cancelled = engine.submit_begun(_Begun("b", log, is_running=True).begin)
    good = engine.submit_begun(_Begun("c", log, is_running=True).begin)
    cancelled.cancel()
    engine.start()
    assert await good == "c"
    with pytest.raises(KeyError, match="a"):
        await failing
    await asyncio.to_thread(engine.stop)
    assert log == ["begin a", "begin c", "finish a", "finish c"]


async def test_work_that_cannot_be_begun_leaves_what_was_begun_before() -> None:
    engine, log = EngineThread(), list[str]()

    def refuse() -> _Begun:
        raise ValueError("refused")

    first = engine.submit_begun(_Begun("a", log, is_running=True).begin)
    refused = engine.submit_begun(refuse)
    engine.start()
    assert await first == "a"
    with pytest.raises(ValueError, match="refused"):
        await refused
    await asyncio.to_thread(engine.stop, lambda: log.append("last"))
    assert log == ["begin a", "finish a", "last"]
