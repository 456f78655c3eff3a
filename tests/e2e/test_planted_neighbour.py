"""A neighbour's prompt pushes one known step over the threshold, and explain names it.

Three requests are queued while the executor is stopped, so what shares a step is decided by the
order of arrival and not by speed. The subject decodes beside a short one; when that has ended, the
third comes in with a prompt of 30 tokens and stays for one step. Under policy `threshold` this step
alone takes other kernels for the subject's row.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scheduler_service.cli import app
from scheduler_service.client import Client, Completion, GenerationParams
from scheduler_service.wire import trace as wire
from tests.support.services import ServicePair, running_pair
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

THRESHOLD = 4
SUBJECT = [(37 * index) % 250 + 3 for index in range(1, 21)]
SHORT = [5, 6, 7]
NEIGHBOUR = [(11 * index) % 250 + 3 for index in range(1, 31)]
NUM_SHORT_TOKENS = 8
NUM_TOKENS = 40
# Wide enough that a float row which is rounded otherwise shows in its fp16 keys and values.
SHAPE = TinyShape(
    hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64,
    vocab_size=vocab_size(), context_length=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    write_directory(folder, SHAPE, Storage(4))
    return folder


@contextmanager
def _pair(model: Path, policy: str) -> Iterator[ServicePair]:
    executor_flags = (
        "--kv-memory-mb", "16", "--threads", "1", "--profile", "off",
        "--policy", policy, "--threshold-rows", str(THRESHOLD),
    )  # fmt: skip
    flags = ("--max-num-seqs", "2")
    with running_pair(model, executor_flags=executor_flags, scheduler_flags=flags) as pair:
        yield pair


def _until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def _planted(pair: ServicePair) -> tuple[Completion, Completion]:
    """Run the subject among the two others; return it and the neighbour."""
    requests = (
        (SUBJECT, GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, trace_kv=True)),
        (SHORT, GenerationParams(max_tokens=NUM_SHORT_TOKENS, ignore_eos=True)),
        (NEIGHBOUR, GenerationParams(max_tokens=1, ignore_eos=True, trace=True)),
    )
    answers: dict[int, Completion] = {}
    pair.executor.process.send_signal(signal.SIGSTOP)
    with Client(pair.schedulers[0].address) as client:

        def ask(index: int) -> None:
            answers[index] = client.complete(*requests[index])

        def queued() -> int:
            stats = client.stats()
            return stats.num_running + stats.num_waiting

        threads = []
        try:
            for index in range(3):
                threads.append(threading.Thread(target=ask, args=(index,)))
                threads[-1].start()
                _until(lambda count=index + 1: queued() == count)  # type: ignore[misc]
        finally:
            pair.executor.process.send_signal(signal.SIGCONT)
            for thread in threads:
                thread.join()
    return answers[0], answers[2]


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app.cli, [str(each) for each in arguments])


def test_explain_names_the_step_the_block_and_the_neighbour(model: Path, tmp_path: Path) -> None:
    with _pair(model, "threshold") as pair:
        subject, neighbour = _planted(pair)
        address = ("--address", pair.schedulers[0].address)
        path = tmp_path / "subject.isotrace"
        path.write_bytes(subject.trace)
        result = _run("explain", path, "--solo", *address, "--json")
        told = _run("explain", path, "--solo", *address)
        replayed = _run("replay", path, *address)
    # What the test knows by itself: the neighbour's only step, and where the subject was by then.
    (step,) = wire.read(neighbour.trace).steps
    assert (step.num_row_tokens, step.num_step_tokens) == (len(NEIGHBOUR), len(NEIGHBOUR) + 1)
    first = wire.read(subject.trace).steps[0].step_id
    position = len(SUBJECT) + step.step_id - first - 1
    block = position // 16
    assert position >= len(SUBJECT) + NUM_SHORT_TOKENS - 2

    assert result.exit_code == told.exit_code == replayed.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["numeric_classes"][0].startswith("F1-threshold4")
    assert (found["first_kv_position"], found["first_kv_block"]) == (position, block)
    mine, alone = found["written_by"]
    assert (mine["step_id"], mine["num_step_tokens"]) == (step.step_id, len(NEIGHBOUR) + 1)
    assert [each["num_tokens"] for each in mine["neighbours"]] == [len(NEIGHBOUR)]
    assert (alone["num_step_tokens"], alone["num_neighbours"]) == (1, 0)
    assert found["first_logits"]["index"] == step.step_id - first
    assert f"block {block} (positions" in told.stdout
    assert f"written by step {step.step_id}, which had 31 rows" in told.stdout
    assert "linear: A ran gemm" in told.stdout
    assert f"step {step.step_id} of A had 31 rows, 30 of them of one neighbour" in told.stdout


def test_under_the_exact_policy_the_same_neighbour_changes_nothing(
    model: Path, tmp_path: Path
) -> None:
    with _pair(model, "exact") as pair:
        subject, neighbour = _planted(pair)
        path = tmp_path / "subject.isotrace"
        path.write_bytes(subject.trace)
        address = ("--address", pair.schedulers[0].address)
        told = _run("explain", path, "--solo", *address)
        replayed = _run("replay", path, *address)
    assert wire.read(neighbour.trace).steps[0].num_step_tokens == len(NEIGHBOUR) + 1
    assert told.exit_code == replayed.exit_code == 0, told.output
    positions = len(SUBJECT) + NUM_TOKENS - 1
    assert f"Equal: 40 tokens, 40 rows of logits, {positions} positions" in told.stdout
    assert "Positions that other kernel paths wrote" in told.stdout
