"""Streams that keep a pair of services busy for the time of a block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_service.client import AsyncClient, GenerationParams

_PAUSE_SECONDS = 0.05


@dataclass(slots=True)
class Load:
    """What has come of the load so far."""

    num_answers: int = 0
    errors: list[BaseException] = field(default_factory=list)
    is_paused: bool = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ask nothing new for the time of a block; answers that have begun go on to their end."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


@contextlib.contextmanager
def steady_load(
    address: str, *, num_streams: int = 6, max_tokens: int = 48, prompt: str = "one two three "
) -> Iterator[Load]:
    """Ask again and again on `num_streams` streams, with prompts of several lengths."""
    load, stop = Load(), threading.Event()

    async def stream(client: AsyncClient, number: int) -> None:
        turn = 0
        while not stop.is_set():
            if load.is_paused:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            text = prompt * (1 + number % 4 + turn % 3)
            params = GenerationParams(
                max_tokens=max_tokens, temperature=0.7 * (number % 2), seed=turn, ignore_eos=True
            )
            async for _ in await client.generate(text, params):
                if stop.is_set():
                    return
            load.num_answers += 1
            turn += 1

    async def run() -> None:
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
            for number in range(num_streams):
                group.create_task(stream(client, number))

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # shown by whoever looks at the load
            load.errors.append(error)

    thread = threading.Thread(target=work, name="load")
    thread.start()
    try:
        yield load
    finally:
        stop.set()
        thread.join()
