"""The prefix cache on disk with the real kernels: a new process finds it, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_service.engine.engine import Engine
from executor_service.errors import ConfigError
from tests.support.prefix_engine import TEXT, Client, build, write_model

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")

NOISE = [[(7 * number + index) % 200 for index in range(96)] for number in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def cold(folder: Path) -> bytes:
    """The digest after TEXT, without any cache."""
    engine = build(folder, prefix_cache=False)
    _, digest = Client(engine).run(TEXT)
    engine.close()
    return digest


def start(folder: Path, disk: Path, **settings: object) -> Engine:
    """An engine with a tier in `disk` that reads however slow this machine is."""
    settings = {"prefix_disk_mb": 20, "prefix_disk_dir": str(disk), **settings}
    engine = build(folder, **settings)
    tier = engine.prefixes.tier
    assert tier is not None
    tier.read_seconds = tier.read_seconds_beside_others = tier.flush_seconds = 60.0
    tier.cost.note_compute = lambda seconds: None  # type: ignore[method-assign]
    return engine


def test_a_restart_finds_what_was_cached(folder: Path, tmp_path: Path, cold: bytes) -> None:
    engine = start(folder, tmp_path)
    assert Client(engine).run(TEXT) == (0, cold)
    assert Client(engine).run(TEXT, salt="tenant") == (0, cold)
    engine.close()
    engine = start(folder, tmp_path)
    client = Client(engine)
    assert client.run(TEXT) == (96, cold)
    assert engine.prefixes.counts.tokens_hit_on_disk == 96
    # Who wrote what came from disk is not known, and nobody else is named for it.
    blocks = engine.session.provenance(client.num_opened, 0).blocks
    assert [block.record.writer_id is None for block in blocks] == [True] * 6 + [False]
    assert client.run(TEXT) == (96, cold)
    assert engine.prefixes.counts.tokens_hit == 96  # by now from memory
    assert client.run(TEXT, salt="other tenant") == (0, cold)
    assert client.run(TEXT, salt="tenant") == (96, cold)
    engine.close()


def test_blocks_that_leave_memory_come_back(folder: Path, tmp_path: Path, cold: bytes) -> None:
    """The pool holds 512 blocks; 600 pass through."""
    engine = start(folder, tmp_path)
    assert Client(engine).run(TEXT) == (0, cold)
    for noise in NOISE:
        Client(engine).run(noise)
    counts, tier = engine.prefixes.counts, engine.prefixes.tier
    assert counts.evictions > 0
    assert counts.tokens_hit_on_disk == 0
    assert tier is not None
    tier.settle()
    assert Client(engine).run(TEXT) == (96, cold)
    assert counts.tokens_hit_on_disk > 0
    engine.close()


def test_a_damaged_block_is_computed_anew(folder: Path, tmp_path: Path, cold: bytes) -> None:
    engine = start(folder, tmp_path)
    Client(engine).run(TEXT)
    engine.close()
    records = sorted(tmp_path.rglob("*.kv"))
    assert len(records) == 6
    for path in records:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    engine = start(folder, tmp_path)
    assert Client(engine).run(TEXT) == (0, cold)
    assert engine.prefixes.tier is not None
    assert engine.prefixes.tier.counts.damaged == 1  # the first one; nobody asks for the others
    engine.close()


def test_two_executors_share_a_folder(folder: Path, tmp_path: Path, cold: bytes) -> None:
    one, two = start(folder, tmp_path), start(folder, tmp_path)
    assert Client(one).run(TEXT) == (0, cold)
    assert Client(two).run(NOISE[0]) == (0, Client(one).run(NOISE[0])[1])
    one.close()
    assert Client(two).run(TEXT) == (96, cold)
    two.close()
    assert not list(tmp_path.rglob(".unfinished*"))


def test_a_folder_that_cannot_be_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="prefix_disk_dir must be a folder to write to"):
        start(folder, tmp_path / "file")
    with pytest.raises(ConfigError, match="prefix_disk_dir must be in a home that exists"):
        start(folder, Path("~no such user/prefixes"))
    with pytest.raises(ConfigError, match="prefix_disk_mb must be 0 without prefix_cache"):
        start(folder, tmp_path, prefix_cache=False)
