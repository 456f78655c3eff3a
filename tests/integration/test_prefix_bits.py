"""Prefix hits on the real kernels: logits and cached bits are those of a cold run, with `==`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.session import Opening
from executor_service.engine.step_request import StepResults
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.steps import Row, Want, all_wanted, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

WANT = Want(Stat.ARGMAX | Stat.DIGEST)
GENERATOR = np.random.default_rng(5)
TEXT = [int(token) for token in GENERATOR.integers(0, 200, 100)]


def build(folder: Path, **settings: object) -> Engine:
    """An engine over the tiny model in `folder`."""
    config = ExecutorConfig(
        listen="unix:/unused/e.sock",
        **{"kv_memory_mb": 1, "threads": 2, **settings},  # type: ignore[arg-type]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(folder / "cache"))
        return build_engine(
            config,
            ModelLocation(folder, "tiny"),
            dispatch.create_backend,
            lambda _: SelfTestResult(0, ()),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path, TinyShape(num_layers=2, vocab_size=200), Storage(4, 32, "float32"))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    built = build(folder)
    yield built
    built.close()


class Client:
    """A new scheduler of an engine; what the index knows stays from one to the next."""

    epoch = 0

    def __init__(self, engine: Engine) -> None:
        type(self).epoch += 1
        self.engine = engine
        self.session = engine.session
        self.ticket = self.session.start(self.epoch)
        self.step_id = 0
        self.num_opened = 0

    def open(self, tokens: list[int], most: int = 10**6, salt: str = "") -> tuple[int, int]:
        """Open a sequence; returns its id and the number of cached positions."""
        self.num_opened += 1
        ids = np.array(tokens, np.int32)
        opening = Opening(self.num_opened, 0, "", salt, ids, most)
        return self.num_opened, self.session.open(self.ticket, [opening])[0]

    def step(self, *rows: Row, verify: bool = False) -> StepResults:
        """Compute a step."""
        self.step_id += 1
        request = step_request(self.step_id, rows)
        answer = self.session.step(self.ticket, all_wanted(request) if verify else request, 0)
        self.session.check_integrity()
        assert answer.results is not None
        return answer.results

    def digest(self, sequence_id: int, tokens: list[int], start: int, chunk: int = 512) -> bytes:
        """Compute the rest of a text and return the digest of its last logits."""
        while True:
            piece = tuple(tokens[start : start + chunk])
            results = self.step(Row(sequence_id, piece, start, want=WANT))
            start += len(piece)
            if start == len(tokens):
                return results.digests


@pytest.fixture(scope="module")
def cold(folder: Path) -> dict[int, bytes]:
    """Digests after each length of TEXT, from an engine without a prefix cache."""
    engine = build(folder, prefix_cache=False)
    digests = {}
    for length in (16, 17, 31, 32, 33, 48, 49, 99, 100):
        client = Client(engine)
        sequence_id, cached = client.open(TEXT[:length])
        assert cached == 0
        digests[length] = client.digest(sequence_id, TEXT[:length], 0)
    engine.close()
    assert len(set(digests.values())) == len(digests)
    return digests


def test_a_hit_at_every_block_has_the_bits_of_a_cold_run(
    engine: Engine, cold: dict[int, bytes]
) -> None:
    writer = Client(engine)
    sequence_id, _ = writer.open([])
    writer.digest(sequence_id, TEXT, 0, chunk=7)
    client = Client(engine)
    for length, digest in cold.items():
        for most in range(0, length, 16):
            sequence_id, cached = client.open(TEXT[:length], most)
            assert cached == most
            assert client.digest(sequence_id, TEXT[:length], cached) == digest
            client.session.release(client.ticket, [sequence_id])


def test_hits_while_the_writer_runs_and_after_evictions(
    engine: Engine, cold: dict[int, bytes]
) -> None:
    """A pool that is always full of others' texts, in random order, with random salts and cuts."""
    client = Client(engine)
    generator = np.random.default_rng(8)
    evictions = engine.prefix_counts.evictions
    hits = 0
    for number in range(60):
        length = int(generator.choice(list(cold)))
        chunk = int(generator.choice([5, 16, 40]))
        mine, cached = client.open(TEXT[:length], salt=str(number % 3))
        hits += cached > 0
        foreign = [client.open([], salt=str(number % 3))[0] for _ in range(4)]
        if number % 2:
            noise = generator.integers(0, 200, (4, 120)).tolist()
            rows = [Row(*each, want=None) for each in zip(foreign, map(tuple, noise), strict=True)]
            client.step(*rows)
        assert client.digest(mine, TEXT[:length], cached, chunk) == cold[length]
        client.session.release(client.ticket, foreign if number % 5 else [mine, *foreign])
        if number % 5 == 4:
            client = Client(engine)
    assert hits > 10
    assert engine.prefix_counts.evictions > evictions


def test_a_refused_draft_leaves_no_trace(engine: Engine, cold: dict[int, bytes]) -> None:
    client = Client(engine)
    salt = "drafts"
    writer, _ = client.open([], salt=salt)
    client.step(Row(writer, tuple(TEXT[:12]), want=WANT))
    wrong = tuple((token + 1) % 200 for token in TEXT[13:20])
    client.step(Row(writer, (TEXT[12], *wrong), 12), verify=True)
    client.step(Row(writer, tuple(TEXT[13:33]), 13, want=WANT))
    _, cached = client.open([*TEXT[:13], *wrong, 1], salt=salt)
    assert cached == 0
    reader, cached = client.open(TEXT[:33], salt=salt)
    assert cached == 32
    assert client.digest(reader, TEXT[:33], cached) == cold[33]
