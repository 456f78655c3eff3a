"""Prefix hits on the real kernels: logits and cached bits are those of a cold run, with `==`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from executor_service.engine.engine import Engine
from tests.support.prefix_engine import TEXT, WANT, Client, build, write_model
from tests.support.steps import Row

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    built = build(folder)
    yield built
    built.close()


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
    evictions = engine.prefixes.counts.evictions
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
    assert engine.prefixes.counts.evictions > evictions


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
