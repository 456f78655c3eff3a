"""Puts a pair of services under a load: solo runs, rounds of load, a look at each idle time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.stress import solo_runs
from tests.stress.idle_state import Snapshot, Watched, memory_growth, wait_idle
from tests.stress.load_generator import Job
from tests.stress.profiles import PROFILES, model_path
from tests.stress.replays import replay_all
from tests.stress.request_pool import PoolRequest, make_pool
from tests.support.services import ServicePair, running_pair, start_executor

_GENERATOR: Final = Path(__file__).with_name("load_generator.py")
_NUM_VICTIM_STREAMS: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """One stress run."""

    profile: str = "real"
    seed: int = 0
    pool_size: int = 40
    # Number of streams of each round.
    rounds: tuple[int, ...] = (64,)
    # A round starts no further request when either is used up.
    seconds_per_round: float = 60.0
    max_requests_per_stream: int = 1_000_000
    # A request that has not ended by then hangs: far above what a queue of 256 needs on a machine
    # that others use too.
    hang_seconds: float = 300.0
    # Processes that generate the load.
    num_generators: int = 2
    # One more process of 4 streams is killed (SIGKILL) in the middle of every round.
    kills_generator: bool = True
    # Seconds between two kills (SIGKILL) and restarts of the executor; 0 for none.
    executor_kill_seconds: float = 0.0
    # Kernel units of the executors that follow each other; the solo runs are the first one's.
    units: tuple[str, ...] = ("auto",)
    # Memory of the key/value cache: small enough for preemptions.
    kv_memory_mb: int = 64
    # Growth of resident memory since the first round of as many streams that counts as a leak.
    memory_limit_mebibytes: float = 32.0


@dataclass(slots=True)
class Round:
    """What came of one round."""

    num_streams: int
    seconds: float
    requests: int = 0
    tokens: int = 0
    whole: int = 0
    executor_kills: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    idle: Snapshot | None = None


@dataclass(slots=True)
class Result:
    """What came of a run."""

    settings: Settings
    rounds: list[Round] = field(default_factory=list)
    # Answers that are not their solo run's, requests that hang or end as they must not.
    violations: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    solo_seconds: float = 0.0
    # Traced requests of the load that were run again alone, digest by digest.
    replays: int = 0

    @property
    def is_clean(self) -> bool:
        """True when no text changed and nothing leaked."""
        return not self.violations and not self.leaks

    def total(self, name: str) -> int:
        """Return the sum of a count over all rounds."""
        return sum(int(getattr(each, name)) for each in self.rounds)

    def totals(self, name: str) -> dict[str, int]:
        """Return the sums of named counts over all rounds."""
        counts: Counter[str] = Counter()
        for each in self.rounds:
            counts.update(getattr(each, name))
        return dict(counts.most_common())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _ExecutorKiller:
    """Kills the executor every so often while a round runs, and starts it again."""

    def __init__(self, run: _Run, seed: str) -> None:
        self.count = 0
        self.failure: BaseException | None = None
        self._run = run
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> _ExecutorKiller:
        if self._run.settings.executor_kill_seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        pause = self._run.settings.executor_kill_seconds
        try:
            while not self._stop.wait(pause * (0.5 + self._rng.random())):
                self._run.kill_executor()
                self.count += 1
        except BaseException as error:
            self.failure = error


class _Run:
    """The state of a run between its parts."""

    def __init__(
        self, settings: Settings, folder: Path, pair: ServicePair, model: Path, ports: list[int]
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.pair = pair
        self.model = model
        self.ports = ports
        self.num_kills = 0
        self.solo_path = folder / "solo.json"
        self.trace_folder = folder / "traces"
        self.trace_folder.mkdir()

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return self.pair.schedulers[0].address

    def watched(self) -> Watched:
        """Return where to look at the services of this moment."""
        scheduler, executor = self.pair.schedulers[0], self.pair.executor
        return Watched(
            scheduler.address, scheduler.process.pid, self.ports[0],
            executor.address, executor.process.pid, self.ports[1],
        )  # fmt: skip

    def kill_executor(self) -> None:
        """Kill the executor and start it again at the same address."""
        self.pair.executor.stop(signal.SIGKILL)
        self.num_kills += 1
        flags = executor_flags(self.settings, self.ports[1], self.num_kills)
        self.pair.executor = start_executor(self.pair.folder, self.model, *flags)

    def start_generator(
        self, round_index: int, first: int, count: int, name: str
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a process that plays `count` streams."""
        settings = self.settings
        result_path = self.folder / f"tally-{round_index}-{name}.json"
        job = Job(
            address=self.address, profile=settings.profile, seed=settings.seed,
            pool_size=settings.pool_size, round_index=round_index, first_stream=first,
            num_streams=count, seconds=settings.seconds_per_round,
            max_requests_per_stream=settings.max_requests_per_stream,
            hang_seconds=settings.hang_seconds,
            solo_path=str(self.solo_path), result_path=str(result_path),
            trace_folder=str(self.trace_folder),
        )  # fmt: skip
        job_path = self.folder / f"job-{round_index}-{name}.json"
        job_path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, str(_GENERATOR), str(job_path)]
        return subprocess.Popen(command, cwd=self.folder), result_path

    def play_round(self, index: int, num_streams: int, result: Result) -> Round:
        """Run the load of one round to its end."""
        settings = self.settings
        started = time.monotonic()
        count = min(settings.num_generators, num_streams)
        borders = [num_streams * each // count for each in range(count + 1)]
        generators = [
            self.start_generator(index, first, last - first, str(first))
            for first, last in itertools.pairwise(borders)
        ]
        victim = None
        if settings.kills_generator:
            victim, _ = self.start_generator(index, num_streams, _NUM_VICTIM_STREAMS, "victim")
        played = Round(num_streams, 0.0)
        with contextlib.ExitStack() as stack:
            for process in [*(each for each, _ in generators), *([victim] if victim else [])]:
                # Only what an error leaves running.
                stack.callback(process.kill)
            killer = stack.enter_context(_ExecutorKiller(self, f"{settings.seed}-kill-{index}"))
            if victim is not None:
                self._kill_midway(victim, generators[0][0])
            for process, path in generators:
                timeout = settings.seconds_per_round + settings.hang_seconds + 60
                try:
                    status = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    status = process.wait()
                if status:
                    result.violations.append(f"round {index}: a generator ended with {status}")
                    continue
                self._add(json.loads(path.read_text()), played, result)
        played.executor_kills = killer.count
        played.seconds = time.monotonic() - started
        return played

    def _kill_midway(self, victim: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
        """Kill `victim` when half of the round is over, and before `other` has ended."""
        end = time.monotonic() + min(self.settings.seconds_per_round / 2, 10.0)
        while time.monotonic() < end and other.poll() is None:
            time.sleep(0.05)
        victim.kill()
        victim.wait()

    def _add(self, tally: dict[str, Any], played: Round, result: Result) -> None:
        for name in ("requests", "tokens", "whole"):
            setattr(played, name, getattr(played, name) + tally[name])
        played.fates = dict(Counter(played.fates) + Counter(tally["fates"]))
        played.ends = dict(Counter(played.ends) + Counter(tally["ends"]))
        result.violations += tally["violations"]


def executor_flags(settings: Settings, metrics_port: int, number: int = 0) -> tuple[str, ...]:
    """Return the flags of the executor that follows `number` others."""
    unit = settings.units[number % len(settings.units)]
    memory = str(settings.kv_memory_mb)
    return ("--kv-memory-mb", memory, "--metrics-port", str(metrics_port), "--unit", unit)


def _check_solo_again(
    runner: asyncio.Runner,
    run: _Run,
    pool: tuple[PoolRequest, ...],
    solos: list[solo_runs.Answer],
    result: Result,
) -> None:
    """Run some requests alone once more, after all that load."""
    some = random.Random(result.settings.seed).sample(pool, min(4, len(pool)))
    answers = runner.run(solo_runs.run_alone(run.address, some))
    for request, answer in zip(some, answers, strict=True):
        found = solo_runs.differences(answer, solos[request.index])
        result.violations += [f"alone afterwards, request {request.index}: {x}" for x in found]


def stress(
    settings: Settings,
    report: Callable[[str], None] = lambda line: None,
    edit_solos: Callable[[list[solo_runs.Answer]], None] = lambda answers: None,
) -> Result:
    """Run the whole of it; `edit_solos` may spoil the solo runs, to see that this is noticed."""
    profile = PROFILES[settings.profile]
    pool = make_pool(profile, settings.seed, settings.pool_size)
    result = Result(settings)
    folder = Path(tempfile.mkdtemp(prefix="ib-load-"))
    try:
        model = model_path(profile, folder)
        ports = [_free_port(), _free_port()]
        services = running_pair(
            model,
            executor_flags=executor_flags(settings, ports[1]),
            scheduler_flags=("--metrics-port", str(ports[0])),
        )
        with services as pair, asyncio.Runner() as runner:
            run = _Run(settings, folder, pair, model, ports)
            started = time.monotonic()
            solos = runner.run(solo_runs.run_alone(run.address, pool))
            result.solo_seconds = time.monotonic() - started
            edit_solos(solos)
            solo_runs.save(run.solo_path, solos)
            report(f"{len(solos)} solo runs in {result.solo_seconds:.1f} s")
            _play_rounds(run, result, report)
            _check_solo_again(runner, run, pool, solos, result)
            result.replays, found = replay_all(run.trace_folder, run.address)
            result.violations += found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _play_rounds(run: _Run, result: Result, report: Callable[[str], None]) -> None:
    settings = run.settings
    base, result.leaks = wait_idle(run.watched())
    # Buffers and touched pages of the cache grow with the number of streams, and then no more.
    first_of_size: dict[int, Snapshot] = {}
    for index, num_streams in enumerate(settings.rounds):
        played = run.play_round(index, num_streams, result)
        idle, played.leaks = wait_idle(run.watched(), base)
        played.idle = idle
        first = first_of_size.setdefault(num_streams, idle)
        played.leaks += memory_growth(first, idle, settings.memory_limit_mebibytes)
        result.rounds.append(played)
        result.leaks += [f"after round {index}: {each}" for each in played.leaks]
        report(
            f"round {index}: {num_streams} streams, {played.seconds:.0f} s, "
            f"{played.requests} requests, {played.tokens} tokens, "
            f"{played.executor_kills} executor kills, {len(result.violations)} violations, "
            f"{idle.stats.num_preemptions} preemptions so far, {len(result.leaks)} leaks; "
            f"scheduler {idle.scheduler}, executor {idle.executor}"
        )
        for line in result.violations[:20] + played.leaks:
            report(f"  {line}")
