"""Traces of requests through a real scheduler over a fake executor."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.speculation import FixedController, Speculator
from scheduler_service.tracing.compare import compare
from scheduler_service.tracing.model import NO_DIGEST, Trace, chained
from scheduler_service.wire import trace as wire
from tests.support.fake_executor import FakeExecutor
from tests.support.proposers import OracleProposer
from tests.support.scheduler_harness import Harness, running
from tests.support.tiny_tokenizer import vocab_size

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 1, "seed": 6},
    {"temperature": 2.0, "top_k": 7, "seed": 7},
    {"temperature": 4.0, "top_p": 0.999, "seed": 8},
    {"temperature": 1.5, "min_p": 0.25, "seed": 9, "logit_bias": {5: 3.5}},
)


def _fields(index: int, max_tokens: int = 6, **more: Any) -> dict[str, Any]:
    prompt = [(7 * index + 3 * each) % 40 + 3 for each in range(5 + 9 * index)]
    return {
        "token_ids": pb.TokenIds(ids=prompt),
        "sampling": sampling_pb2.SamplingParams(**SAMPLINGS[index % len(SAMPLINGS)]),
        "stopping": sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        **more,
    }


async def _traced(harness: Harness, **fields: Any) -> tuple[list[int], list[bytes], Trace, bytes]:
    """Run a request and return its tokens, digests, trace, and the trace's bytes."""
    tokens: list[int] = []
    digests: list[bytes] = []
    data = b""
    async for event in harness.generate(**{"trace": True, **fields}):
        match event.WhichOneof("event"):
            case "accepted":
                data += event.accepted.trace
            case "delta":
                data += event.delta.trace
                tokens += event.delta.token_ids
                digests += event.delta.logits_digests
            case "finished":
                data += event.finished.trace
    return tokens, digests, wire.read(data), data


async def test_a_traced_request_has_the_tokens_it_has_without_a_trace() -> None:
    async with running(FakeExecutor()) as harness:
        alone = [await harness.complete(**_fields(index)) for index in range(len(SAMPLINGS))]
        traced = await asyncio.gather(
            *(
                _traced(harness, **_fields(index, return_logits_digests=True))
                for index in range(len(SAMPLINGS))
            )
        )
    for output, (tokens, digests, trace, _) in zip(alone, traced, strict=True):
        assert tokens == output.token_ids
        recorded = [token for token, _ in trace.tokens]
        assert [each.token_id for each in recorded] == tokens
        assert [each.logits_digest for each in recorded] == digests
        assert all(len(each.top_ids) == 2 and (each.margin or 0) >= 0 for each in recorded)
        assert trace.end is not None
        assert trace.end.outcome == "length"
        assert trace.end.logits_digest == chained(NO_DIGEST, digests)


async def test_a_trace_says_what_was_asked_and_what_each_step_held() -> None:
    async with running(FakeExecutor(), max_prefill_chunk=16) as harness:
        (tokens, _, trace, _), _ = await asyncio.gather(
            _traced(harness, request_id="r", **_fields(3)),
            harness.complete(**_fields(1, max_tokens=12)),
        )
    prompt = _fields(3)["token_ids"].ids
    header = trace.header
    assert (header.request_id, header.model, header.numeric_class) == ("r", "toy", "X1-toy")
    assert list(header.prompt_token_ids) == list(prompt)
    assert (header.sampling.top_k, header.sampling.seed, header.max_tokens) == (7, 7, 6)
    position = 0
    for step in trace.steps:
        assert step.start_position == position
        position += step.num_row_tokens
        assert step.num_row_tokens + step.max_neighbour_tokens <= step.num_step_tokens
    assert position == len(prompt) + len(tokens) - 1
    assert {step.num_neighbours for step in trace.steps} == {0, 1} or all(
        step.num_neighbours == 1 for step in trace.steps
    )
    assert [token.position for token, _ in trace.tokens] == list(
        range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    )


@pytest.mark.parametrize("stop", [(), ("t",)])
async def test_the_cache_is_told_of_when_the_request_ends(stop: tuple[str, ...]) -> None:
    async with running(FakeExecutor()) as harness:
        fields = _fields(0, max_tokens=40 if stop else 8)
        fields["stopping"].stop.extend(stop)
        tokens, _, trace, _ = await _traced(harness, trace_kv=True, **fields)
        again = await _traced(harness, trace_kv=True, **fields)
        without = await _traced(harness, **fields)
    assert len(tokens) < 40
    held = sum(len(block.steps) for block in trace.blocks)
    # A stop string is found while the next step runs.
    assert held - (5 + len(tokens) - 1) in ((0, 1) if stop else (0,))
    assert [len(block.digests) for block in trace.blocks] == [
        len(block.steps) for block in trace.blocks
    ]
    assert [block.digests for block in again[2].blocks] == [block.digests for block in trace.blocks]
    assert {block.digests for block in without[2].blocks} == {()}


async def test_a_trace_is_kept_in_the_folder_whatever_becomes_of_the_request(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "traces"
    async with running(FakeExecutor(), trace_dir=str(folder)) as harness:
        _, _, _, data = await _traced(harness, request_id="whole", **_fields(1))
        call = harness.generate(trace=True, request_id="../left", **_fields(2, max_tokens=400))
        async for event in call:
            if event.WhichOneof("event") == "delta":
                call.cancel()
                break
        await harness.wait_idle()
        assert harness.metric("trace_bytes_total") > len(data)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert names[0].startswith("___left-")
    assert (folder / "whole.isotrace").read_bytes() == data
    left = wire.read((folder / names[0]).read_bytes())
    assert left.end is not None
    assert left.end.outcome == "cancelled"
    assert left.tokens


async def test_a_verified_row_gives_each_of_its_tokens_with_its_own_logits() -> None:
    fields = [_fields(index, max_tokens=12, return_logits_digests=True) for index in range(3)]
    async with running(FakeExecutor()) as harness:
        plain = [await _traced(harness, trace_kv=True, **each) for each in fields]
        truth = {
            tuple(each["token_ids"].ids): run[0] for each, run in zip(fields, plain, strict=True)
        }
        served = harness.server.engine.served
        assert served is not None
        proposer = OracleProposer(truth, vocab_size(), noise=0.3)
        served.loop.speculator = Speculator(proposer, FixedController(4), 4)
        runs = await asyncio.gather(*(_traced(harness, trace_kv=True, **each) for each in fields))
    for before, after in zip(plain, runs, strict=True):
        assert max(len(step.tokens) for step in after[2].steps) > 1
        assert after[:2] == before[:2]
        tokens = [token for token, _ in after[2].tokens]
        assert tokens == [token for token, _ in before[2].tokens]
        assert after[2].end == before[2].end
        assert compare(before[2], after[2]).is_equal
        assert compare(before[2], after[2]).has_kv_digests


async def test_a_restart_of_the_executor_closes_no_trace_and_loses_no_token() -> None:
    fake = FakeExecutor()
    async with running(fake) as harness:
        expected = await harness.complete(**_fields(2, max_tokens=12))
        reached, gate = asyncio.Event(), asyncio.Event()

        async def hold(step: token_rows_pb2.Step) -> None:
            if len(fake.computed_step_ids) == 17:
                reached.set()
                await gate.wait()

        fake.before_step = hold
        call = asyncio.ensure_future(_traced(harness, trace_kv=True, **_fields(2, max_tokens=12)))
        await reached.wait()
        fake.restart()
        gate.set()
        tokens, _, trace, _ = await call
    assert tokens == expected.token_ids
    assert trace.end is not None
    assert trace.end.num_preemptions == 1
    assert {step.generation for step in trace.steps} == {0, 1}
    assert {block.generation for block in trace.blocks} == {1}


@pytest.mark.parametrize("data", [b"", b"nonsense", wire.kernel_paths(())])
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    with pytest.raises(wire.TraceFormatError):
        wire.read(data)
