"""Clients leave, sessions break, the executor restarts and lies about its blocks, all at once."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from scheduler_service.wire.trace import read as read_trace
from tests.support.fake_executor import DropSession, FakeExecutor
from tests.support.scheduler_harness import Harness, running
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

MODEL = ToyModel(vocab_size())
NUM_CLIENTS = 24


class _Trouble:
    """Breaks about one step in fifteen, in one of three ways."""

    def __init__(self, executor: FakeExecutor, rng: random.Random) -> None:
        self.executor = executor
        self.rng = rng
        self.counts = {"restart": 0, "drop": 0, "forget": 0}

    async def __call__(self, step: token_rows_pb2.Step) -> None:
        if self.rng.random() > 1 / 15:
            return
        kind = self.rng.choice(sorted(self.counts))
        self.counts[kind] += 1
        if kind == "restart":
            self.executor.restart()
        elif kind == "forget":
            self.executor.sequences.clear()
        raise DropSession


async def _client(harness: Harness, seed: int) -> str:
    """Run one request as `seed` says, check its tokens, and return how it ended."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.random() * 0.3)
    prompt = [rng.randrange(3, vocab_size()) for _ in range(rng.randrange(1, 40))]
    max_tokens = rng.randrange(1, 40)
    patience = rng.choice([None, None, rng.randrange(1, 20)])
    expected = MODEL.solo_run(prompt, SamplingParams(temperature=1.0, seed=seed), max_tokens)
    call: Any = harness.generate(
        timeout=rng.choice([None, None, None, 0.3]),
        request_id=str(seed),
        token_ids=pb.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=seed),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        trace=seed % 3 > 0,
        trace_kv=seed % 3 == 2,
    )
    tokens: list[int] = []
    pieces: list[bytes] = []
    try:
        async for event in call:
            pieces.append(getattr(event, event.WhichOneof("event")).trace)
            if event.WhichOneof("event") == "delta":
                assert event.delta.start_index == len(tokens)
                tokens += event.delta.token_ids
                assert tokens == expected[: len(tokens)]
            elif event.WhichOneof("event") == "finished":
                assert tokens == expected
                if seed % 3:
                    trace = read_trace(b"".join(pieces))
                    assert [token.token_id for token, _ in trace.tokens] == expected
                    assert trace.end is not None
                return "finished"
            if patience is not None and len(tokens) >= patience:
                call.cancel()
                return "left"
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "late"
        # By what was measured in all this trouble the deadline may be out of reach.
        if "within the deadline" in (error.details() or ""):
            return "refused"
        raise
    raise AssertionError("a stream must have an end")


@pytest.mark.parametrize("seed", range(3))
async def test_streams_survive_every_trouble_with_the_same_tokens(seed: int) -> None:
    executor = FakeExecutor(num_blocks=60, block_size=4, max_num_batched_tokens=32)
    trouble = _Trouble(executor, random.Random(seed))
    executor.before_step = executor.after_step = trouble
    async with running(executor, max_num_seqs=10, max_prefill_chunk=8) as harness:
        # Fewer blocks than the scheduler was told of.
        executor.num_blocks = 40
        async with asyncio.timeout(180):
            ends = await asyncio.gather(
                *(_client(harness, 1000 * seed + each) for each in range(NUM_CLIENTS))
            )
        assert ends.count("finished") >= NUM_CLIENTS // 3
        assert set(ends) > {"finished"}
        assert sum(trouble.counts.values()) >= 3
        executor.before_step = executor.after_step = None
        await harness.wait_idle()
        served = harness.server.engine.served
        assert served is not None
        served.loop.state.check_invariants()
        assert not served.loop.fan_out.streams
        assert served.loop.tracer.is_idle
