"""Ways to leave a stream that belong to one face: threads, signals, tasks, garbage."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from scheduler_service.client import (
    AsyncClient,
    Client,
    GenerationParams,
    RequestCancelledError,
)
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler


def test_close_from_another_thread_ends_the_iteration(fake: FakeScheduler) -> None:
    """A reader that waits for the next token wakes up and sees the end."""
    fake.script = fake_scheduler.endless
    with Client(fake.address) as client:
        stream = client.generate("x")
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        events = list(stream)
        closer.join()
        assert "".join(event.text for event in events) == "w0 w1 "
        assert stream.text == "w0 w1 "
        with pytest.raises(RequestCancelledError, match="got 2 tokens"):
            stream.completion()
    assert fake.ended.acquire(timeout=60)


def test_close_of_the_client_ends_its_streams_with_an_error(fake: FakeScheduler) -> None:
    """Unlike `stream.close()`, this was not the reader's own wish."""
    fake.script = fake_scheduler.endless
    client = Client(fake.address)
    stream = client.generate("x")
    for _ in range(3):
        next(stream)
    closer = threading.Timer(0.1, client.close)
    closer.start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    closer.join()


def test_dropping_a_stream_cancels_the_request(fake: FakeScheduler) -> None:
    """`break` in a plain loop is enough."""
    fake.script = fake_scheduler.endless
    with Client(fake.address) as client:
        for _ in client.generate("x"):
            break
        gc.collect()
        assert fake.ended.acquire(timeout=60)


def test_one_client_serves_many_threads(fake: FakeScheduler) -> None:
    """Streams of one connection do not mix."""
    texts: dict[int, str] = {}

    def ask(count: int, client: Client) -> None:
        texts[count] = client.complete("x", GenerationParams(max_tokens=count)).text

    with Client(fake.address) as client:
        threads = [threading.Thread(target=ask, args=(count, client)) for count in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {
        count: "".join(f"w{index} " for index in range(count)) for count in range(1, 7)
    }


def test_iteration_after_the_end_stays_ended(fake: FakeScheduler) -> None:
    """An iterator that has ended does not start again, and closing it is harmless."""
    with Client(fake.address) as client:
        stream = client.generate("x")
        list(stream)
        stream.close()
        assert list(stream) == []
        assert stream.completion().text == "w0 w1 w2 w3 w4 "


async def test_cancelled_task_cancels_the_request(fake: FakeScheduler) -> None:
    """The task's CancelledError passes through, and the server is told."""
    fake.script = fake_scheduler.endless
    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(client.complete("x"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.ended.acquire, timeout=60)


async def test_async_close_from_another_task_ends_the_iteration(fake: FakeScheduler) -> None:
    """As with threads."""
    fake.script = fake_scheduler.endless
    async with AsyncClient(fake.address) as client:
        stream = await client.generate("x")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        assert "".join([event.text async for event in stream]) == "w0 w1 "
        with pytest.raises(RequestCancelledError):
            await stream.completion()


async def test_async_close_of_the_client_is_not_a_cancelled_task(fake: FakeScheduler) -> None:
    """gRPC raises CancelledError here; a task that nobody cancelled must not see it."""
    fake.script = fake_scheduler.endless
    client = AsyncClient(fake.address)
    stream = await client.generate("x")
    for _ in range(3):
        await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(RequestCancelledError):
        await reader


async def test_many_async_streams_at_once(fake: FakeScheduler) -> None:
    """Streams of one connection do not mix."""
    async with AsyncClient(fake.address) as client:
        answers = await asyncio.gather(
            *(client.complete("x", GenerationParams(max_tokens=count)) for count in range(1, 7))
        )
    assert [len(answer.token_ids) for answer in answers] == [1, 2, 3, 4, 5, 6]
