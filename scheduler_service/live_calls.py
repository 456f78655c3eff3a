"""Counts the calls that stream an answer, so that a service that ends knows when all are over."""

import asyncio
from typing import Any, TypeAlias

import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic in the stubs alone


class LiveCalls:
    """The calls between their first message and the end of their status. On the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._over = asyncio.Event()
        self._over.set()

    def __len__(self) -> int:
        return self._count

    def enter(self, context: _Context) -> None:
        """Count a call until it ends, in whatever way."""
        self._count += 1
        self._over.clear()
        context.add_done_callback(self._leave)  # type: ignore[arg-type]  # not a protocol there

    def _leave(self, _: _Context) -> None:
        self._count -= 1
        if not self._count:
            self._over.set()

    async def all_over(self) -> None:
        """Return once no call is live."""
        await self._over.wait()
