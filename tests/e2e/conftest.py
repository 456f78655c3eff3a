"""One pair of processes over a tiny model for all tests of a worker that leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.healthy_pair import HealthyPair
from tests.support.tiny_pair import free_port, tiny_pair


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """Port of the metrics page of `running`'s scheduler."""
    return free_port()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[HealthyPair]:
    """The pair."""
    with tiny_pair(tmp_path_factory.mktemp("models") / "tiny", metrics_port) as pair:
        yield pair


@pytest.fixture
async def stub(running: HealthyPair) -> AsyncIterator[Any]:
    """The pair's scheduler, with eight healthy streams beside the test and the leak rule after."""
    async with running.trouble() as stub:
        yield stub
