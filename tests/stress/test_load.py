"""Half a minute of load: no text changes, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.stress import solo_runs
from tests.stress.load_generator import Job, play
from tests.stress.load_harness import Settings, stress
from tests.stress.load_plan import Fate
from tests.stress.profiles import PROFILES
from tests.stress.request_pool import make_pool
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, running, until
from tests.support.toy_model import ToyModel

# The machine may be busy with other tests.
pytestmark = pytest.mark.timeout(300)

POOL_SIZE = 24


def test_tiny_model_with_preemptions_and_killed_executors() -> None:
    settings = Settings(
        profile="tiny",
        pool_size=POOL_SIZE,
        rounds=(64, 64),
        hang_seconds=100.0,
        seconds_per_round=3.0,
        executor_kill_seconds=3.0,
        units=("auto", "scalar"),
        kv_memory_mb=1,
    )
    result = stress(settings, print)
    assert result.violations == []
    assert result.leaks == []
    assert result.total("whole") > 0
    assert result.replays > 0
    assert result.rounds[-1].idle is not None
    assert result.rounds[-1].idle.preemptions["executor_restart"] > 0


def test_real_model() -> None:
    settings = Settings(
        profile="brief", pool_size=12, rounds=(1, 16), seconds_per_round=3.0, num_generators=1
    )
    result = stress(settings, print)
    assert result.violations == []
    assert result.leaks == []
    assert result.total("whole") > 0
    assert result.replays > 0


def _job(harness: Harness, folder: Path, *, num_streams: int, num_requests: int) -> Job:
    return Job(
        address=f"unix:{harness.socket}",
        profile="tiny",
        seed=0,
        pool_size=POOL_SIZE,
        round_index=0,
        first_stream=0,
        num_streams=num_streams,
        seconds=60.0,
        hang_seconds=100.0,
        max_requests_per_stream=num_requests,
        solo_path=str(folder / "solo.json"),
        result_path="",
    )


def _toy_executor() -> FakeExecutor:
    # Few blocks, so that requests are preempted.
    return FakeExecutor(model=ToyModel(PROFILES["tiny"].vocab_size), num_blocks=40)


def _tasks() -> Counter[str]:
    """Count this loop's tasks by what they run; a long-lived one may be another object by now."""
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())


async def _usual_tasks() -> Counter[str]:
    """Count the tasks of an idle scheduler, those included that are there now and then."""
    usual = _tasks()
    for _ in range(20):
        await asyncio.sleep(0.02)
        usual |= _tasks()
    return usual


async def _tasks_settle(before: Counter[str]) -> None:
    async def holds() -> bool:
        return _tasks() <= before

    try:
        await until(holds)
    except TimeoutError:
        raise AssertionError(f"tasks are left: {_tasks() - before}") from None


async def test_tasks_and_streams_of_a_scheduler_are_back_after_256_clients(tmp_path: Path) -> None:
    pool = make_pool(PROFILES["tiny"], 0, POOL_SIZE)
    async with running(_toy_executor()) as harness:
        solos = await solo_runs.run_alone(f"unix:{harness.socket}", pool)
        solo_runs.save(tmp_path / "solo.json", solos)
        await harness.wait_idle()
        tasks = await _usual_tasks()
        for num_streams in (1, 256):
            tally = await play(_job(harness, tmp_path, num_streams=num_streams, num_requests=1))
            assert tally.violations == []
            await harness.wait_idle()
            await _tasks_settle(tasks)
            served = harness.server.engine.served
            assert served is not None
            served.loop.state.check_invariants()
            assert not served.loop.fan_out.streams
            assert not served.loop.fan_out.digest_ids
        assert set(tally.fates) == set(Fate)


async def test_changed_answers_are_noticed(tmp_path: Path) -> None:
    """One other token id, digest or text in the solo runs, and the load says so."""
    pool = make_pool(PROFILES["tiny"], 0, POOL_SIZE)
    async with running(_toy_executor()) as harness:
        solos = await solo_runs.run_alone(f"unix:{harness.socket}", pool)
        for answer in solos:
            answer.token_ids[0] ^= 1
        solo_runs.save(tmp_path / "solo.json", solos)
        tally = await play(_job(harness, tmp_path, num_streams=8, num_requests=3))
        assert any("token 0 of" in each for each in tally.violations)
