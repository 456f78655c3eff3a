"""A disk that is full or slow: what the tier says and how long it waits."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from executor_service.disk_cache.folder import DiskFolder
from executor_service.disk_cache.tier import DiskTier
from executor_service.kv_cache.block_pool import BlockId
from tests.support.disk_blocks import FORMAT, Blocks, chain

BLOCK = BlockId(3)


def test_it_goes_on_when_there_is_room_and_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = [0.0]
    blocks = Blocks()
    folder = DiskFolder(tmp_path, FORMAT.namespace, 10**6)
    tier = DiskTier(folder, FORMAT, blocks, clock=lambda: now[0])
    blocks.fill(BLOCK, 1)
    first, second, third = chain(3)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for _ in range(2):
            tier.keep(first, BLOCK)
            tier.settle()
            now[0] += 31.0
    assert (tier.is_paused, tier.counts.failed) == (True, 2)
    assert caplog.text.count("no blocks are written to disk until it takes one") == 1
    for node in (second, third):
        tier.keep(node, BLOCK)
        tier.settle()
    assert (tier.is_paused, tier.counts.written) == (False, 2)
    assert caplog.text.count("blocks are written to disk again") == 1
    tier.close()


class _StuckQueue(queue.Queue[Any]):
    """Whoever waits for room waits in vain, in the time of the test."""

    now = 0.0

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        assert timeout is not None
        self.now += timeout
        raise queue.Full


def test_the_end_is_bounded_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, waiting for room and waiting for the disk together."""
    stuck = _StuckQueue()
    gate = threading.Event()
    monkeypatch.setattr(DiskFolder, "trim", lambda _: gate.wait(60))
    blocks = Blocks()
    blocks.fill(BLOCK, 1)
    folder = DiskFolder(tmp_path, FORMAT.namespace, 10**6)
    tier = DiskTier(folder, FORMAT, blocks, clock=lambda: stuck.now)
    mine, tier._queue = tier._queue, stuck
    tier.flush([(node, BLOCK) for node in chain(9)], 5.0)
    assert stuck.now == 5.0
    mine.put(None)
    gate.set()
