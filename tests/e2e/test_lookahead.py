"""Steps sent ahead on real kernels: tokens, text, logits and traces are those of one at a time."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.wire.trace import read as read_trace
from tests.support.scheduler_harness import Harness, running, until
from tests.support.services import Service, start_executor
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

SHAPE = TinyShape(vocab_size=vocab_size() + 13, context_length=160)
FLAGS = ("--kv-memory-mb", "1", "--threads", "1", "--profile", "off")
NUM_TOKENS = 40
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "seed": 4, "logit_bias": {7: 3.0}},
    {"temperature": 0.0, "logit_bias": {9: 1.5}},
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with the tiny model; the path of a socket in it is short."""
    path = Path(tempfile.mkdtemp(prefix="ib-"))
    try:
        write_directory(path / "model", SHAPE, Storage(4))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def executor(folder: Path) -> Iterator[Service]:
    service = start_executor(folder, folder / "model", *FLAGS)
    try:
        yield service
    finally:
        service.stop()


async def _streams(harness: Harness, count: int = 8, **fields: Any) -> list[Any]:
    """What each of the requests got, all at once: tokens, text, digests of logits."""

    async def one(index: int) -> Any:
        stopping = sampling_pb2.StoppingParams(
            # They end one after the other: by length, by a string, by a token.
            max_tokens=NUM_TOKENS - 3 * index,
            ignore_eos=True,
            stop=["e"] if index == 5 else [],
            stop_token_ids=range(20, 40) if index == 6 else [],
        )
        output = await harness.complete(
            token_ids=pb.TokenIds(ids=range(5 + index, 12 + 5 * index)),
            sampling=sampling_pb2.SamplingParams(**SAMPLING[index % len(SAMPLING)]),
            stopping=stopping,
            return_logits_digests=True,
            **fields,
        )
        return output.token_ids, output.text, output.digests, output.finished.reason

    return await asyncio.gather(*map(one, range(count)))


async def _with(lookahead: str, address: str, **fields: Any) -> tuple[list[Any], float]:
    """What the requests got, and how many steps were sent ahead."""
    async with running(start_executor=False, executor=address, lookahead=lookahead) as harness:
        await harness.wait_serving()
        found = await _streams(harness, **fields)
        served = harness.server.engine.served
        assert served is not None
        labels = {"model": served.capabilities.model.model_id}
        name = "isobatch_scheduler_steps_ahead_total"
        num_ahead = harness.server.registry.get_sample_value(name, labels)
        assert num_ahead is not None
        return found, num_ahead


async def test_streams_get_the_same_bits_with_and_without_steps_ahead(executor: Service) -> None:
    plain, none = await _with("off", executor.address)
    ahead, some = await _with("auto", executor.address)
    assert ahead == plain
    assert (none, some > NUM_TOKENS // 2) == (0, True)
    alone, _ = await _with("auto", executor.address, count=1)
    assert alone == plain[:1]


async def test_traces_tell_the_same_tokens_and_positions(executor: Service) -> None:
    """Also where a row was computed in vain: the trace ends where the request does."""
    traces = []
    for lookahead in ("off", "auto"):
        async with running(
            start_executor=False, executor=executor.address, lookahead=lookahead
        ) as harness:
            await harness.wait_serving()
            call = harness.generate(
                token_ids=pb.TokenIds(ids=range(5, 30)),
                stopping=sampling_pb2.StoppingParams(
                    max_tokens=NUM_TOKENS, ignore_eos=True, stop=["e"]
                ),
                trace=True,
                trace_kv=True,
            )
            pieces = [getattr(event, event.WhichOneof("event")).trace async for event in call]
            traces.append(read_trace(b"".join(pieces)))
    plain, ahead = traces
    assert [token for token, _ in ahead.tokens] == [token for token, _ in plain.tokens]
    assert ahead.end == plain.end
    digests = [[each.digests for each in trace.blocks] for trace in traces]
    assert digests[0] == digests[1]
    assert any(digests[0])


async def test_an_executor_killed_with_steps_under_way_changes_no_bit(
    folder: Path, executor: Service
) -> None:
    plain, _ = await _with("off", executor.address)
    async with running(start_executor=False, executor=executor.address) as harness:
        await harness.wait_serving()
        served = harness.server.engine.served
        assert served is not None
        streams = asyncio.ensure_future(_streams(harness))

        async def is_ahead() -> bool:
            state = served.loop.state
            return state.step_id > 12 and state.ahead is not None

        await until(is_ahead)
        executor.stop(signal.SIGKILL)
        await harness.wait_serving(False)
        again = start_executor(folder, folder / "model", *FLAGS)
        try:
            assert await streams == plain
        finally:
            again.stop()
