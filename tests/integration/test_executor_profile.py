"""The cost curve in GetCapabilities: measured before the executor is ready, then remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_service import speed_watch
from executor_service.engine import profile_measure
from isobatch.executor.v1 import capabilities_pb2
from tests.support.executor_harness import SessionClient, ready, running, step_message
from tests.support.fake_backend import CLEARED, GARBAGE
from tests.support.tiny_model import Storage, TinyShape, write_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(path, TinyShape(num_layers=1, vocab_size=64), Storage(4))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    # However slow the machine: every shape is timed, and no check of speed runs meanwhile.
    monkeypatch.setattr(profile_measure, "BUDGET_NS", 3600 * 10**9)
    monkeypatch.setattr(speed_watch, "QUIET_SECONDS", 3600.0)
    return tmp_path


LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
SHAPES = {(1, 1), (2, 2), (3, 3), (4, 4), (1, 16)}


async def test_the_first_start_measures_and_the_second_remembers(model: Path, cache: Path) -> None:
    async with running(model, profile="auto", **LIMITS) as harness:
        first = (await ready(harness)).models[0]
    assert first.profile_origin == capabilities_pb2.PROFILE_ORIGIN_MEASURED
    assert first.profile_measured_at > 1_600_000_000
    assert {(point.num_rows, point.num_tokens) for point in first.cost_curve} == SHAPES
    decode = [point.duration_ns for point in first.cost_curve if point.num_rows == point.num_tokens]
    assert decode == sorted(decode)
    assert all(point.median_ns > 0 for point in first.cost_curve)
    assert len(list((cache / "profiles").iterdir())) == 1
    async with running(model, profile="auto", **LIMITS) as harness:
        second = (await ready(harness)).models[0]
        # The warm-up alone: nothing was measured.
        assert harness.backends[0].num_runs == 2
    assert second.profile_origin == capabilities_pb2.PROFILE_ORIGIN_STORED
    assert second.cost_curve == first.cost_curve
    assert second.profile_measured_at == first.profile_measured_at


async def test_off_has_no_curve(model: Path, cache: Path) -> None:
    async with running(model, profile="off", **LIMITS) as harness:
        found = (await ready(harness)).models[0]
    assert found.profile_origin == capabilities_pb2.PROFILE_ORIGIN_OFF
    assert not found.cost_curve
    assert not (cache / "profiles").exists()


async def test_a_session_after_a_measurement_starts_with_an_empty_cache(model: Path) -> None:
    async with running(model, profile="measure", **LIMITS) as harness:
        reply = await ready(harness)
        backend = harness.backends[0]
        async with harness.channel() as channel:
            client = SessionClient(channel)
            started = await client.start(1)
            assert started.kv_occupancy.free_blocks == reply.models[0].num_blocks
            await client.open(1)
            await client.step(step_message(1, [(1, [5, 6], 0)]))
        # The toy backend fails on a position that holds another sequence's token.
        block = next(row for row in backend.cache if row[0] == 5)
        assert block.tolist() == [5, 6, *[CLEARED] * 14]
        assert GARBAGE in backend.cache
