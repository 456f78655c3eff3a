"""Traced requests among random neighbours are run again, alone, and every digest is equal."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from scheduler_service.cli import app
from scheduler_service.client import Client, Completion, GenerationParams
from scheduler_service.tracing.compare import writings
from scheduler_service.wire import trace as wire
from tests.support.services import running_pair
from tests.support.tiny_model import Storage, write_directory
from tests.support.tiny_pair import EXECUTOR_FLAGS, SHAPE

NUM_NEIGHBOURS = 6
NUM_TRACED = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(folder, SHAPE, Storage(4))
    return folder


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """A scheduler over the tiny model, whose steps split prompts."""
    flags = ("--max-prefill-chunk", "24", "--trace-dir", str(model.parent / "traces"))
    with running_pair(model, executor_flags=EXECUTOR_FLAGS, scheduler_flags=flags) as pair:
        yield pair.schedulers[0].address


def _request(rng: random.Random) -> tuple[list[int], GenerationParams]:
    prompt = [rng.randrange(3, 280) for _ in range(rng.randrange(1, 90))]
    params = GenerationParams(
        max_tokens=rng.randrange(10, 40), ignore_eos=True, seed=rng.randrange(2**64)
    )
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 9},
        {"temperature": 3.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "logit_bias": {7: 2.5, 11: -100.0}},
    )
    return prompt, replace(params, **rng.choice(kinds))


@pytest.fixture(scope="module")
def traced(address: str) -> list[Completion]:
    """Traced requests, all of which ran beside neighbours that came and went."""
    rng = random.Random(9)
    is_over = threading.Event()
    are_there = threading.Barrier(NUM_NEIGHBOURS + 1)
    answers: list[Completion] = []
    with Client(address) as client:

        def crowd(seed: int) -> None:
            own = random.Random(seed)
            client.complete(*_request(own))
            are_there.wait()
            while not is_over.is_set():
                client.complete(*_request(own))

        threads = [threading.Thread(target=crowd, args=(seed,)) for seed in range(NUM_NEIGHBOURS)]
        for thread in threads:
            thread.start()
        try:
            are_there.wait()
            for _ in range(NUM_TRACED):
                prompt, params = _request(rng)
                params = replace(params, trace=True, trace_kv=True)
                answers.append(client.complete(prompt, params))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    return answers


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app.cli, [str(each) for each in arguments])


def test_a_replay_starts_a_server_of_its_own(
    model: Path, traced: list[Completion], tmp_path: Path
) -> None:
    """With the model that the trace names, unless another one is named."""
    path = tmp_path / "own.isotrace"
    path.write_bytes(traced[0].trace)
    own = ("--serve", "--kv-memory-mb", "1", "--threads", "1")
    result = _run("replay", path, *own, "--model", model)
    assert result.exit_code == 0, result.output
    assert "Equal: " in result.stdout
    result = _run("replay", path, *own)
    assert result.exit_code == 78
    assert wire.read(traced[0].trace).header.model in result.stderr


def test_every_digest_of_a_crowded_run_is_that_of_a_run_alone(
    address: str, traced: list[Completion], tmp_path: Path
) -> None:
    num_crowded = 0
    for index, answer in enumerate(traced):
        path = tmp_path / f"{index}.isotrace"
        path.write_bytes(answer.trace)
        trace = wire.read(answer.trace)
        num_crowded += sum(step.num_neighbours > 0 for step in trace.steps)
        result = _run("replay", path, "--address", address, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        positions = len(trace.header.prompt_token_ids) + len(answer.token_ids) - 1
        assert found["num_compared_tokens"] == len(answer.token_ids)
        assert found["num_compared_logits"] == len(answer.token_ids)
        assert found["num_compared_positions"] == positions
    assert num_crowded


def test_provenance_of_every_position_is_the_traces_own_account(
    traced: list[Completion],
) -> None:
    for answer in traced:
        trace = wire.read(answer.trace)
        own = {
            position: step
            for step in trace.steps
            for position in range(step.start_position, step.start_position + step.num_row_tokens)
        }
        for block in trace.blocks:
            for slot, step in enumerate(block.steps):
                assert step is not None
                mine = own[block.block_index * 16 + slot]
                assert (step.step_id, step.num_tokens) == (mine.step_id, mine.num_step_tokens)
                assert len(step.sequence_hashes) == mine.num_step_rows
                paths = {(each.op, each.path) for each in mine.kernel_paths}
                assert {(each.op, each.path) for each in step.kernel_paths} == paths


def test_a_prefix_of_another_request_is_told_of_and_has_its_bits(
    address: str, tmp_path: Path
) -> None:
    rng = random.Random(77)
    prompt = [rng.randrange(3, 280) for _ in range(50)]
    params = GenerationParams(max_tokens=12, ignore_eos=True, trace=True, trace_kv=True)
    with Client(address) as client:
        first = client.complete(prompt, params)
        second = client.complete([*prompt, 9, 8, 7], params)
    assert (first.usage.num_cached_tokens, second.usage.num_cached_tokens) == (0, 48)
    own, shared = wire.read(first.trace), wire.read(second.trace)
    writers = [block.writer_hash for block in shared.blocks]
    assert writers[:3] == [own.blocks[0].writer_hash] * 3
    assert writers[3] not in writers[:3]
    assert [block.steps for block in shared.blocks[:3]] == [block.steps for block in own.blocks[:3]]
    assert [each.is_shared for each in writings(shared).values()] == [True] * 48 + [False] * 16
    path = tmp_path / "t.isotrace"
    path.write_bytes(second.trace)
    result = _run("replay", path, "--address", address)
    assert result.exit_code == 0, result.output
    assert "64 positions of keys and values" in result.stdout


def test_a_trace_that_was_tampered_with_is_told_apart(
    address: str, traced: list[Completion], tmp_path: Path
) -> None:
    trace = wire.read(traced[0].trace)
    victim = trace.blocks[0].digests[5]
    path = tmp_path / "t.isotrace"
    path.write_bytes(traced[0].trace.replace(victim, bytes(16)))
    result = _run("explain", path, "--solo", "--address", address, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["first_kv_position"], found["first_kv_block"]) == (5, 0)
    assert found["first_token"] is found["first_logits"] is None


def test_a_replay_wants_the_class_of_the_trace(
    address: str, traced: list[Completion], tmp_path: Path
) -> None:
    trace = wire.read(traced[1].trace)
    other = wire.header(replace(trace.header, numeric_class="X9"))
    head = wire.header(trace.header)
    assert traced[1].trace.startswith(head)
    path = tmp_path / "t.isotrace"
    path.write_bytes(other + traced[1].trace.removeprefix(head))
    refused = _run("replay", path, "--address", address)
    assert refused.exit_code == 4
    assert "the server must compute in class X9, got X1" in refused.stderr
    solo = _run("explain", path, "--solo", "--address", address)
    assert solo.exit_code == 0, solo.output
    assert "The numeric classes differ: A X9, B X1" in solo.stdout


def test_a_speculated_run_has_the_digests_of_a_plain_one(model: Path, tmp_path: Path) -> None:
    # A prompt that repeats itself, so that drafts are found in it.
    prompt = [5, 6, 7, 8, 9, 10] * 6
    params = GenerationParams(max_tokens=40, ignore_eos=True, trace_kv=True)
    flags = ("--speculation", "lookup")
    with running_pair(model, executor_flags=EXECUTOR_FLAGS, scheduler_flags=flags) as pair:
        with Client(pair.schedulers[0].address) as client:
            answer = client.complete(prompt, params)
        pair.schedulers[0].stop()
        plain = pair.start_scheduler()
        path = tmp_path / "t.isotrace"
        path.write_bytes(answer.trace)
        result = _run("replay", path, "--address", plain.address, "--json")
    # Whether drafts pay is a question of speed, so there need not be any; their tokens are counted.
    for step in wire.read(answer.trace).steps:
        assert len(step.tokens) <= step.num_row_tokens
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_compared_tokens"] == found["num_compared_logits"] == 40
    assert found["num_compared_positions"] == len(prompt) + 39
