"""The order in which an executor comes up."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest

from executor_service import server, socket_paths
from executor_service.config import ExecutorConfig
from executor_service.errors import ConfigError
from executor_service.models.registry import ModelLocation


def test_the_disk_gets_what_is_left_of_the_time_to_stop() -> None:
    """A service manager kills after 30 s, whatever the disk does."""
    assert [server.disk_seconds(elapsed) for elapsed in (0.0, 25.0, 40.0)] == [10.0, 3.0, 1.0]
    # Who was told twice writes no more than that.
    assert server.disk_seconds(0.0, is_hurried=True) == 1.0


def test_signals_are_heeded_before_anything_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees the socket, or its folder, may send SIGTERM at once."""
    seen: list[object] = []

    def prepare(path: Path) -> None:
        seen.extend(signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT))
        raise ConfigError("[listen] as far as this test goes")

    monkeypatch.setattr(socket_paths, "prepare", prepare)
    config = ExecutorConfig(model="m", listen=f"unix:{tmp_path}/x.sock")
    location = ModelLocation(tmp_path / "m.gguf", "m")

    def never(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("nothing is to be loaded")

    async def run() -> int:
        executor = server.Server(config, location, never, never)
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
        code = await executor.run()
        assert len(seen) == 2
        assert not set(seen) & set(before)
        return code

    assert asyncio.run(run()) == server.EXIT_CONFIG
