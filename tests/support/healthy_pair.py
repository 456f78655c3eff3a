"""A pair of processes that has answered eight bystanders alone, for tests that make trouble."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.bystanders import (
    Answer,
    Footprint,
    assert_idle,
    bystanders,
    connected,
    footprint,
    solo_answers,
)
from tests.support.services import ServicePair, running_pair


@dataclass(frozen=True, slots=True)
class HealthyPair:
    """Two processes, what each bystander gets alone, and their footprint at idle."""

    pair: ServicePair
    requests: list[dict[str, Any]]
    solo: list[Answer]
    before: Footprint

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        return self.pair.schedulers[0].address

    @contextlib.asynccontextmanager
    async def trouble(self) -> AsyncIterator[Any]:
        """The scheduler's methods, with healthy streams beside and the leak rule afterwards."""
        healthy = bystanders(self.address, self.requests, self.solo)
        async with healthy, connected(self.address) as stub:
            yield stub
        await assert_idle(self.address, self.before)


@contextlib.contextmanager
def healthy_pair(
    model: str | Path,
    requests: list[dict[str, Any]],
    *,
    executor_flags: tuple[str, ...] = (),
    scheduler_flags: tuple[str, ...] = (),
) -> Iterator[HealthyPair]:
    """Start a pair and ask for each request alone; at the end the same two processes must live."""
    with running_pair(
        model, executor_flags=executor_flags, scheduler_flags=scheduler_flags
    ) as pair:
        processes = [pair.executor.process, pair.schedulers[0].process]
        address = pair.schedulers[0].address
        solo = asyncio.run(solo_answers(address, requests))
        asyncio.run(_warm(address))
        yield HealthyPair(pair, requests, solo, footprint(*(each.pid for each in processes)))
        assert [each.poll() for each in processes] == [None, None]


async def _warm(address: str) -> None:
    """Start the threads that encode long prompts, and all else that comes up on demand."""
    async with connected(address) as stub:
        request = pb.TokenizeRequest(text="one two three " * 2000)
        await asyncio.gather(*(stub.Tokenize(request) for _ in range(8)))
