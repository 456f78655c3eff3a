"""Requests leave no series of their own behind, whatever they are called."""

from __future__ import annotations

import grpc
import prometheus_client
import pytest

from tests.support.scheduler_harness import Harness, running


def _series(harness: Harness) -> set[str]:
    """Names and labels of every line of the page."""
    page = prometheus_client.generate_latest(harness.server.registry).decode()
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


async def test_the_number_of_series_does_not_grow() -> None:
    async with running() as harness:
        await harness.complete(token_ids={"ids": [5, 6]}, stopping={"max_tokens": 2})
        before = _series(harness)
        for number in range(60):
            await harness.complete(
                text=f"one {number}", request_id=f"id-{number}",
                stopping={"max_tokens": 1, "stop": [f"secret {number}"]},
            )  # fmt: skip
            with pytest.raises(grpc.aio.AioRpcError):
                await harness.complete(text="two", model=f"model-{number}")
        assert _series(harness) == before
