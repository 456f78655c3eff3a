"""A process that plays some streams of a plan against a scheduler and checks every answer.

    python tests/stress/load_generator.py job.json

It exits with 0 and a JSON file of counts and violations, also when there are violations.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import (
    AsyncClient,
    DeadlineError,
    Finished,
    InvalidRequestError,
    IsobatchError,
    OverloadedError,
    RequestCancelledError,
    TokenEvent,
)
from tests.stress.load_plan import Action, Fate, draw_action
from tests.stress.profiles import PROFILES
from tests.stress.replays import TraceSample
from tests.stress.request_pool import PoolRequest, Profile, make_pool
from tests.stress.solo_runs import Answer, differences, load

_EXPECTED: Final[dict[Fate, type[IsobatchError] | tuple[type[IsobatchError], ...]]] = {
    # The second where the deadline is out of reach from the start.
    Fate.DEADLINE: (DeadlineError, OverloadedError),
    Fate.HANG_UP: RequestCancelledError,
    Fate.INVALID: InvalidRequestError,
}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    address: str
    profile: str
    seed: int
    pool_size: int
    round_index: int
    first_stream: int
    num_streams: int
    # A stream starts no further request when either is used up.
    seconds: float
    max_requests_per_stream: int
    # A request that has not ended by then hangs.
    hang_seconds: float
    solo_path: str
    result_path: str
    # Where traces of some requests are kept; empty for none.
    trace_folder: str = ""


@dataclass(slots=True)
class Tally:
    """What came of it."""

    requests: int = 0
    tokens: int = 0
    whole: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


async def _play(
    client: AsyncClient,
    request: PoolRequest,
    action: Action,
    answer: Answer,
    trace: list[bytes] | None,
) -> None:
    """Send a request and treat it as the action says; with `trace`, its trace comes there."""
    fate = action.fate
    params = replace(request.params, priority=action.priority, client_id=action.client_id)
    if fate is Fate.INVALID:
        params = replace(params, max_tokens=0)
    if trace is not None:
        params = replace(params, trace=True, trace_kv=True)
    timeout = action.seconds if fate is Fate.DEADLINE else None
    budget = action.seconds
    async with contextlib.AsyncExitStack() as stack:
        if fate is Fate.HANG_UP:
            client = await stack.enter_async_context(
                AsyncClient(client.address, connect_timeout=60.0)
            )
        stream = await client.generate(request.prompt, params, timeout=timeout)
        await stack.enter_async_context(stream)
        has_acted = False
        async for event in stream:
            if trace is not None:
                trace.append(event.trace)
            if isinstance(event, TokenEvent | Finished):
                answer.add(event)
            if fate is Fate.SLOW and budget > 0:
                await asyncio.sleep(0.1 * action.seconds)
                budget -= 0.1 * action.seconds
            if has_acted or len(answer.token_ids) < action.after_tokens:
                continue
            has_acted = True
            if fate is Fate.CANCEL:
                await client.cancel(stream.request_id)
            elif fate is Fate.LEAVE:
                return
            elif fate is Fate.HANG_UP:
                await client.close()


async def _dropped(playing: Awaitable[None], seconds: float) -> str:
    """Cancel the task that plays after some time."""
    task = asyncio.ensure_future(playing)
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "dropped"
    return ""


async def _one(
    client: AsyncClient,
    request: PoolRequest,
    action: Action,
    answer: Answer,
    hang_seconds: float,
    trace: list[bytes] | None,
) -> str:
    """Play one action; return how it ended. Raises what must not happen."""
    try:
        async with asyncio.timeout(hang_seconds):
            playing = _play(client, request, action, answer, trace)
            if action.fate is Fate.DROP:
                return await _dropped(playing, action.seconds) or answer.reason
            await playing
    except IsobatchError as error:
        if not isinstance(error, _EXPECTED.get(action.fate, ())):
            raise
        return type(error).__name__
    if action.fate is Fate.INVALID:
        raise AssertionError("a request that breaks a rule was accepted")
    if not answer.reason and action.fate is not Fate.LEAVE:
        raise AssertionError("the stream ended without Finished")
    return answer.reason or "left"


async def _stream(
    job: Job, profile: Profile, stream: int, pool: tuple[PoolRequest, ...], solos: list[Answer],
    tally: Tally, sample: TraceSample,
) -> None:  # fmt: skip
    """Play one stream of the plan until its time or its requests are used up."""
    end = time.monotonic() + job.seconds
    async with AsyncClient(job.address, connect_timeout=60.0) as client:
        for number in range(job.max_requests_per_stream):
            action = draw_action(profile, job.pool_size, job.seed, job.round_index, stream, number)
            await asyncio.sleep(action.wait_seconds)
            if time.monotonic() >= end:
                return
            answer = Answer()
            trace: list[bytes] | None = [] if sample.wants(stream, number) else None
            tally.requests += 1
            tally.fates[action.fate] = tally.fates.get(action.fate, 0) + 1
            try:
                request = pool[action.request_index]
                how = await _one(client, request, action, answer, job.hang_seconds, trace)
                found = differences(answer, solos[action.request_index])
            except TimeoutError:
                how, found = "hang", [f"no end within {job.hang_seconds:g} s"]
            except Exception as error:
                how, found = "failure", [f"{type(error).__name__}: {error}"]
            tally.ends[how] = tally.ends.get(how, 0) + 1
            tally.tokens += len(answer.token_ids)
            tally.whole += answer.is_whole
            if trace is not None and answer.is_whole:
                sample.keep(b"".join(trace), stream, number)
            where = f"seed {job.seed} round {job.round_index} stream {stream} number {number}"
            tally.violations += [f"{where}: {action}: {each}" for each in found]


async def play(job: Job) -> Tally:
    """Play the job's streams all at once."""
    profile = PROFILES[job.profile]
    pool = make_pool(profile, job.seed, job.pool_size)
    solos = load(Path(job.solo_path))
    tally, sample = Tally(), TraceSample(job.trace_folder)
    streams = range(job.first_stream, job.first_stream + job.num_streams)
    await asyncio.gather(
        *(_stream(job, profile, stream, pool, solos, tally, sample) for stream in streams)
    )
    return tally


def main() -> None:
    """Read the job, play it, write the tally."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    tally = asyncio.run(play(job))
    Path(job.result_path).write_text(json.dumps(asdict(tally)))


if __name__ == "__main__":
    main()
