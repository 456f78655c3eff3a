"""Ten minutes of load with 64 streams, on request: `pytest -m stress` (or `make stress`)."""

from __future__ import annotations

import pytest

from tests.stress.load_harness import Settings, stress


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_ten_minutes_of_64_streams() -> None:
    result = stress(Settings(rounds=(64,) * 10), print)
    assert result.violations == []
    assert result.leaks == []
    assert result.total("whole") > 0


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_two_minutes_of_256_streams_and_killed_executors() -> None:
    settings = Settings(
        profile="tiny", rounds=(256, 1, 64, 256), seconds_per_round=30.0,
        executor_kill_seconds=8.0,
        units=("auto", "scalar"), kv_memory_mb=1,
    )  # fmt: skip
    result = stress(settings, print)
    assert result.violations == []
    assert result.leaks == []
    assert result.total("executor_kills") > 0
