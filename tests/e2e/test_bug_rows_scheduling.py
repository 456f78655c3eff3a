"""Faults that users of other servers reported, and the right behaviour here. See docs/bug_rows.md.

A tiny model with a pool smaller than two long requests, and eight healthy streams beside.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.bystanders import (
    Output,
    Refusal,
    bystander_requests,
    refused,
    run,
)
from tests.support.healthy_pair import HealthyPair, healthy_pair
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_pair import EXECUTOR_FLAGS, SHAPE
from tests.support.tiny_tokenizer import vocab_size

CODE = grpc.StatusCode
LENGTH = sampling_pb2.FINISH_REASON_LENGTH


def _ids(count: int, seed: int = 3) -> pb.TokenIds:
    return pb.TokenIds(ids=[(seed * index) % 250 + 3 for index in range(1, count + 1)])


def _stop(max_tokens: int, **fields: Any) -> sampling_pb2.StoppingParams:
    return sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


async def _with(
    stub: Any, num_tokens: int = 12, prompt: pb.TokenIds | None = None, **sampling: Any
) -> Output:
    return await run(
        stub,
        token_ids=prompt or _ids(4),
        sampling=sampling_pb2.SamplingParams(**sampling),
        stopping=_stop(num_tokens),
    )


def _never_77(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    changed = sampling_pb2.SamplingParams()
    changed.CopyFrom(sampling)
    changed.logit_bias[77] = -100.0
    return changed


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[HealthyPair]:
    """A model in which one token's embedding is beyond what numbers may be."""
    shape = TinyShape(vocab_size=vocab_size(), context_length=512, tied=False)
    write_directory(tmp_path / "m", shape, Storage(0, dtype="bfloat16"))
    path = str(tmp_path / "m" / "model.safetensors")
    tensors = mx.load(path)
    assert isinstance(tensors, dict)
    tensors["model.embed_tokens.weight"][77] = 1e30
    mx.save_safetensors(path, tensors)
    requests = [
        {**request, "sampling": _never_77(request["sampling"])}
        for request in bystander_requests(30, [[50, 206, 282], [28, 39, 16]])
    ]
    with healthy_pair(tmp_path / "m", requests, executor_flags=EXECUTOR_FLAGS) as pair:
        yield pair


async def test_b10_numbers_that_overflow_end_their_own_request(poisoned: HealthyPair) -> None:
    """And the blocks that held them are clean for whoever gets them next."""

    async def found(stub: Any, prompt: list[int]) -> Refusal:
        token_ids = pb.TokenIds(ids=prompt)
        return await refused(
            stub.Generate(pb.GenerateRequest(token_ids=token_ids, stopping=_stop(5)))
        )

    async with poisoned.trouble() as stub:
        for prompt in ([77], [5, 77, 6], [9] * 40 + [77]):
            refusal = await found(stub, prompt)
            assert (refusal.code, refusal.reason) == (CODE.INTERNAL, "REQUEST_FAILED")
            assert "layer" in refusal.message


async def test_b19_a_seed_repeats_whatever_is_beside_it(stub: Any) -> None:
    for seed in (0, 42, 2**63 - 1, 2**64 - 1):
        outputs = [await _with(stub, temperature=0.8, seed=seed) for _ in range(3)]
        assert {output.answer for output in outputs} == {outputs[0].answer}
        assert outputs[0].accepted.seed == seed
    drawn = [await _with(stub, temperature=0.8) for _ in range(2)]
    assert drawn[0].accepted.seed != drawn[1].accepted.seed
    again = await _with(stub, temperature=0.8, seed=drawn[0].accepted.seed)
    assert again.answer == drawn[0].answer


async def test_b20_every_way_to_keep_one_token_is_the_argmax(stub: Any) -> None:
    greedy = await _with(stub)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_p": 0.0, "top_k": 1, "min_p": 1.0},
        {"temperature": 0.0, "top_p": 0.1},
        {"temperature": 1e-8, "top_p": 1.0},
        {"temperature": 1e-8, "top_p": 0.0, "top_k": 1, "min_p": 1.0},
        {"temperature": 1.5, "top_p": 0.0},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "min_p": 1.0},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.0, "min_p": 1.0},
    ]
    for sampling in ways:
        assert (await _with(stub, **sampling)).answer == greedy.answer, sampling
    assert (await _with(stub, temperature=3e38, seed=1)).answer != greedy.answer


async def test_b22_every_parameter_has_an_effect(stub: Any) -> None:
    """One that were dropped in silence would leave the answer of the plain draw."""
    base: dict[str, Any] = {"temperature": 5.0, "seed": 9}
    changes: list[dict[str, Any]] = [
        {}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"seed": 10}, {"temperature": 4.0},
        {"logit_bias": {40: 30.0}},
    ]  # fmt: skip
    answers = [(await _with(stub, 40, **{**base, **change})).answer for change in changes]
    assert len(set(answers)) == len(answers)
    assert (await _with(stub, 40, **base)).answer == answers[0]


async def test_b31_odd_but_lawful_prompts_are_answered(stub: Any) -> None:
    prompts: list[dict[str, Any]] = [
        {"text": " "}, {"text": "\n\n"}, {"text": "\0"}, {"text": "<|im_start|>"},
        {"token_ids": pb.TokenIds(ids=[0])}, {"token_ids": pb.TokenIds(ids=[0])},
        {"token_ids": pb.TokenIds(ids=[SHAPE.vocab_size - 1])},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="")])},
    ]  # fmt: skip
    for prompt in prompts:
        assert len((await run(stub, **prompt, stopping=_stop(3))).token_ids) == 3


async def test_b32_exactly_as_many_tokens_as_asked_for(stub: Any) -> None:
    async def ask(count: int) -> None:
        output = await _with(stub, count)
        assert len(output.token_ids) == output.finished.usage.num_generated_tokens == count
        assert output.finished.reason == LENGTH
        assert output.finished.usage.num_prompt_tokens == 4
        assert output.accepted.max_tokens == count

    for count in (1, 2, 3):
        await ask(count)
    await asyncio.gather(*(ask(count) for count in range(1, 17)))


async def test_b34_the_context_is_filled_to_its_end_and_not_beyond(stub: Any) -> None:
    """A longer wish is cut at once, and Accepted says so; a prompt without room is refused."""
    context = SHAPE.context_length
    last = await _with(stub, 50, prompt=_ids(context - 1))
    assert (last.accepted.max_tokens, len(last.token_ids)) == (1, 1)
    assert last.finished.reason == LENGTH
    near = await run(
        stub,
        token_ids=_ids(context - 5),
        stopping=sampling_pb2.StoppingParams(ignore_eos=True),
    )
    assert (near.accepted.max_tokens, len(near.token_ids)) == (5, 5)
    assert near.finished.reason == LENGTH
    for length in (context, context + 1, 2 * context):
        call = stub.Generate(pb.GenerateRequest(token_ids=_ids(length)), timeout=30.0)
        assert (await refused(call)).reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_b35_what_the_pool_cannot_hold_together_runs_in_turn(stub: Any) -> None:
    """Two requests of 60 % each, with short ones behind them; nobody waits for ever."""
    long = [_ids(2400, seed) for seed in (3, 7)]
    alone = [await _with(stub, 60, prompt=prompt) for prompt in long]
    tasks = [asyncio.create_task(_with(stub, 60, prompt=prompt)) for prompt in long]
    short = [asyncio.create_task(_with(stub, 5)) for _ in range(5)]
    together = await asyncio.gather(*tasks)
    assert [each.answer for each in together] == [each.answer for each in alone]
    assert len({output.answer for output in await asyncio.gather(*short)}) == 1


async def test_b38_streams_go_on_while_a_long_prompt_is_read(stub: Any) -> None:
    """A token in every step: as many as the prompt has chunks."""
    counts = [0] * 4
    begun = [asyncio.Event() for _ in counts]

    async def stream(index: int) -> None:
        request = pb.GenerateRequest(token_ids=_ids(4), stopping=_stop(900))
        call = stub.Generate(request)
        async for event in call:
            counts[index] += len(event.delta.token_ids)
            if counts[index]:
                begun[index].set()

    tasks = [asyncio.create_task(stream(index)) for index in range(4)]
    for each in begun:
        await each.wait()
    before = list(counts)
    # 512 tokens of a prompt in a step at most, those that decode not counted.
    output = await _with(stub, 1, prompt=_ids(2600))
    assert output.finished.timings.time_to_first_token_ns > 0
    assert all(now - then >= 4 for now, then in zip(counts, before, strict=True))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _series(port: int) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {re.sub(r" \S+$", "", line) for line in lines if not line.startswith("#")}


async def test_b52_series_are_few_and_fixed(stub: Any, metrics_port: int) -> None:
    before = await asyncio.to_thread(_series, metrics_port)
    secret = "sesame"
    for index in range(40):
        await run(
            stub, text=f"{secret} {index}", request_id=f"{secret}-{index}", cache_salt=secret,
            stopping=_stop(1, stop=[f"{secret}{index}"]),
        )  # fmt: skip
        call = stub.Generate(pb.GenerateRequest(text="x", model=f"{secret}-{index}"))
        assert (await refused(call)).code is CODE.NOT_FOUND
    started = time.perf_counter()
    after = await asyncio.to_thread(_series, metrics_port)
    assert time.perf_counter() - started < 10.0
    assert after == before
    assert len(after) < 300
    assert not any(secret in line for line in after)


def test_b49_a_forked_child_works_or_fails_but_does_not_hang(running: HealthyPair) -> None:
    code = """
import os, sys
from scheduler_service.client import Client
address = sys.argv[1]
with Client(address) as client:
    client.list_models()
    child = os.fork()
    if child == 0:
        try:
            with Client(address) as own:
                os._exit(0 if own.list_models(timeout=30.0) else 1)
        except BaseException:
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.list_models()
print("child", code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, running.address],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("child 0", "child 3")
