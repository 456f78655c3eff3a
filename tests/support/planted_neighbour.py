"""A neighbour whose prompt joins one known step of a request that is traced, on two real services.

Three requests are queued while the executor is stopped, so what shares a step is decided by the
order of arrival and not by speed. The subject decodes beside a short one; when that has ended, the
third comes in with a prompt of 30 tokens and stays for one step.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from scheduler_service.cli import app
from scheduler_service.client import Client, Completion, GenerationParams
from scheduler_service.wire import trace as wire
from tests.support.services import ServicePair, running_pair
from tests.support.tiny_model import TinyShape
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


@dataclass(frozen=True, slots=True)
class Told:
    """What the test knows of the planted step by itself, and what the commands said."""

    step_id: int  # the neighbour's only step
    num_step_tokens: int  # its rows
    index: int  # of the subject's token in that step
    position: int  # of the subject's keys and values that the step wrote
    exit_codes: tuple[int, int, int]  # explain as data, explain in words, replay
    data: dict[str, Any]
    words: str


@contextmanager
def _pair(model: Path, policy: str, backend: str) -> Iterator[ServicePair]:
    executor_flags = (
        "--kv-memory-mb", "16", "--threads", "1", "--profile", "off", "--backend", backend,
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


def explain_planted(model: Path, policy: str, folder: Path, backend: str = "auto") -> Told:
    """Plant the neighbour under a kernel policy, and compare the subject with its run alone."""
    path = folder / "subject.isotrace"
    with _pair(model, policy, backend) as pair:
        subject, neighbour = _planted(pair)
        path.write_bytes(subject.trace)
        address = ("--address", pair.schedulers[0].address)
        data = _run("explain", path, "--solo", *address, "--json")
        words = _run("explain", path, "--solo", *address)
        replay = _run("replay", path, *address)
    (step,) = wire.read(neighbour.trace).steps
    first = wire.read(subject.trace).steps[0].step_id
    return Told(
        step_id=step.step_id,
        num_step_tokens=step.num_step_tokens,
        index=step.step_id - first,
        position=len(SUBJECT) + step.step_id - first - 1,
        exit_codes=(data.exit_code, words.exit_code, replay.exit_code),
        data=json.loads(data.stdout),
        words=words.stdout,
    )
