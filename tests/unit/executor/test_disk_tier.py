"""The tier on disk: what comes back is what went, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor_service.disk_cache import tier as disk_tier_module
from executor_service.disk_cache.folder import DiskFolder
from executor_service.disk_cache.tier import CostRule, DiskTier
from executor_service.kv_cache.block_pool import BlockId
from tests.support.disk_blocks import FORMAT, IDENTITY, Blocks, chain, disk_tier, files
from tests.support.open_files import open_files

BLOCK = BlockId(3)


def stored(root: Path, length: int = 1, salt: str = "") -> list[np.ndarray]:
    """Bring a chain to disk and end the tier; returns the bits."""
    blocks = Blocks()
    tier = disk_tier(root, blocks)
    bits = []
    for seed, node in enumerate(chain(length, salt)):
        bits.append(blocks.fill(BLOCK, seed))
        tier.keep(node, BLOCK)
    tier.close()
    assert tier.counts.written == length
    return bits


def loaded(tier: DiskTier, length: int = 1, salt: str = "") -> list[np.ndarray | None]:
    assert tier.begin(is_alone=True)
    return [tier.load(node) for node in chain(length, salt)]


def test_another_process_gets_the_same_bits(tmp_path: Path) -> None:
    bits = stored(tmp_path, 3)
    blocks = Blocks()
    tier = disk_tier(tmp_path, blocks)
    for expected, got in zip(bits, loaded(tier, 3), strict=True):
        assert got is not None
        assert got.tobytes() == expected.tobytes()
        tier.put(BLOCK, got)
        assert blocks.contents[BLOCK].tobytes() == expected.tobytes()
    tier.close()


@pytest.mark.parametrize("where", [0, 9, 15, 60, 400, 600, -33, -32, -1])
def test_one_wrong_byte_is_a_miss(tmp_path: Path, where: int) -> None:
    stored(tmp_path)
    (path,) = files(tmp_path)
    record = bytearray(path.read_bytes())
    record[where] ^= 1
    path.write_bytes(record)
    tier = disk_tier(tmp_path, Blocks())
    assert loaded(tier) == [None]
    assert tier.counts.damaged == 1
    assert files(tmp_path) == []
    tier.close()


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_record_that_is_cut_or_longer_is_a_miss(tmp_path: Path, change: bytes) -> None:
    stored(tmp_path)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] if not change else path.read_bytes() + change)
    tier = disk_tier(tmp_path, Blocks())
    assert loaded(tier) == [None]
    tier.close()


def test_an_empty_file_and_a_link_are_misses(tmp_path: Path) -> None:
    stored(tmp_path, 2)
    first, second = files(tmp_path)
    content = second.read_bytes()
    first.write_bytes(b"")
    second.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    second.symlink_to(tmp_path / "elsewhere")
    tier = disk_tier(tmp_path, Blocks())
    assert loaded(tier, 2) == [None, None]
    tier.close()


def test_what_is_no_file_is_a_miss_and_holds_nothing_up(tmp_path: Path) -> None:
    """A folder, a pipe that nobody writes to and a file larger than the whole bound."""
    stored(tmp_path, 3)
    folder, pipe, huge = files(tmp_path)
    for path in (folder, pipe, huge):
        path.unlink()
    folder.mkdir()
    os.mkfifo(pipe)
    huge.touch()
    os.truncate(huge, 10**12)
    tier = disk_tier(tmp_path, Blocks())
    before = open_files()
    assert loaded(tier, 3) == [None, None, None]
    opened = open_files() - before
    assert [target for _, target in opened if target.startswith(os.fspath(tmp_path))] == []
    tier.close()


def test_a_record_that_cannot_be_marked_as_used_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bits,) = stored(tmp_path)
    tier = disk_tier(tmp_path, Blocks())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "utime", refuse)
    (got,) = loaded(tier)
    assert got is not None
    assert got.tobytes() == bits.tobytes()
    tier.close()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    root, blocks = tmp_path / "prefixes", Blocks()
    tier = disk_tier(root, blocks)
    bits = blocks.fill(BLOCK, 1)
    shutil.rmtree(root)
    tier.keep(chain(1)[0], BLOCK)
    tier.settle()
    assert (tier.counts.written, tier.counts.failed) == (1, 0)
    (got,) = loaded(tier)
    assert got is not None
    assert got.tobytes() == bits.tobytes()
    assert root.stat().st_mode & 0o777 == 0o700
    tier.close()


def test_a_record_under_anothers_name_is_a_miss(tmp_path: Path) -> None:
    stored(tmp_path, 2)
    one, two = (tmp_path / FORMAT.namespace / f"{node.digest.hex()}.kv" for node in chain(2))
    two.write_bytes(one.read_bytes())
    tier = disk_tier(tmp_path, Blocks())
    first, second = loaded(tier, 2)
    assert first is not None
    assert second is None
    assert (tier.counts.damaged, two.exists()) == (1, False)
    tier.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(FORMAT, build="other"),
        replace(FORMAT, shape=(2, 2, 2, 16, 4)),
        replace(FORMAT, identity=replace(IDENTITY, numeric_class="X2")),
        replace(FORMAT, identity=replace(IDENTITY, weights_digest="other")),
        replace(FORMAT, identity=replace(IDENTITY, config_digest="other")),
    ],
)
def test_another_class_build_or_model_never_meets(tmp_path: Path, other: object) -> None:
    """Neither by its folder, nor when its file is put into ours."""
    assert isinstance(other, type(FORMAT))
    stored(tmp_path)
    tier = disk_tier(tmp_path, Blocks(), record_format=other)
    assert loaded(tier) == [None]
    assert tier.counts.damaged == 0
    (path,) = files(tmp_path)
    path.rename(tmp_path / other.namespace / path.name)
    assert loaded(tier) == [None]
    assert tier.counts.damaged == 1
    tier.close()


def test_a_tenants_salt_is_not_on_disk_and_finds_only_its_own(tmp_path: Path) -> None:
    stored(tmp_path, salt="my secret tenant")
    (path,) = files(tmp_path)
    assert b"my secret tenant" not in path.read_bytes()
    tier = disk_tier(tmp_path, Blocks())
    assert loaded(tier) == loaded(tier, salt="other") == [None]
    (own,) = loaded(tier, salt="my secret tenant")
    assert own is not None
    tier.close()


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        stored(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "n", 1600)
    for number in range(10):
        folder.write(str(number), bytes(100), number)
    assert folder.read("0", 10) == bytes(100)
    for number in range(11, 22):
        folder.write(str(number), bytes(100), number)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 1600
    names = {path.stem for path in files(tmp_path)}
    assert {"0", "21"} <= names
    assert not names & {"1", "2", "3"}
    assert folder.num_records == len(names)
    assert folder.num_evicted == 21 - len(names)


def test_the_beginning_of_a_chain_outlives_its_end(tmp_path: Path) -> None:
    """Whether it was written before its end or after it, or read last."""
    stored(tmp_path, 1)
    blocks = Blocks()
    blocks.fill(BLOCK, 1)
    tier = disk_tier(tmp_path, blocks)
    tier.flush([(node, BLOCK) for node in chain(5)])
    paths = [tmp_path / FORMAT.namespace / f"{node.digest.hex()}.kv" for node in chain(5)]
    times = [path.stat().st_mtime_ns for path in paths[1:]]
    assert times == sorted(times, reverse=True)
    tier = disk_tier(tmp_path, blocks)
    assert all(bits is not None for bits in loaded(tier, 5))
    times = [path.stat().st_mtime_ns for path in paths]
    assert times == sorted(times, reverse=True)
    tier.close()


def test_two_processes_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    mine, other = DiskFolder(tmp_path, "n", 1000), DiskFolder(tmp_path, "m", 1000)
    for number in range(9):
        other.write(f"other {number}", bytes(100), 2 * number)
        mine.write(f"mine {number}", bytes(100), 2 * number + 1)
    mine.trim()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1000
    gone = [number for number in range(9) if other.read(f"other {number}", 0) is None]
    assert gone
    other.remove("other 0")
    other.write("other 0", bytes(100), 99)
    assert other.read("other 0", 0) == bytes(100)


def test_what_a_dead_process_left_is_removed_in_time(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "n", 1000)
    old, new = (tmp_path / "n" / f".unfinished-{name}" for name in ("old", "new"))
    old.write_bytes(b"1")
    new.write_bytes(b"1")
    os.utime(old, (time.time() - 7200,) * 2)
    folder.trim()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_full_disk_is_counted_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    blocks = Blocks()
    blocks.fill(BLOCK, 1)
    tier = disk_tier(tmp_path, blocks)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        tier.keep(chain(1)[0], BLOCK)
        tier.close()
    assert (tier.counts.failed, tier.counts.written) == (1, 0)
    assert list(tmp_path.rglob("*.*")) == []  # nothing half-written
    tier.keep(chain(2)[1], BLOCK)  # not even read: nobody would write it
    assert tier._queue.empty()


def test_a_block_that_finds_the_queue_full_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier_module, "QUEUE_BYTES", 0)  # four blocks
    gate = threading.Event()
    trim = DiskFolder.trim

    def wait(folder: DiskFolder) -> None:
        gate.wait(60)
        trim(folder)

    monkeypatch.setattr(DiskFolder, "trim", wait)
    blocks = Blocks()
    blocks.fill(BLOCK, 1)
    tier = disk_tier(tmp_path, blocks)
    for node in chain(7):
        tier.keep(node, BLOCK)
    assert tier.counts.dropped == 3
    gate.set()
    tier.close()
    assert tier.counts.written == 4


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    stored(tmp_path)
    tier = disk_tier(tmp_path, Blocks())
    tier.keep(chain(1)[0], BLOCK)  # has no contents: reading it would fail
    tier.flush([(chain(1)[0], BLOCK)])
    assert tier.counts.written == 0


def test_a_block_that_was_in_use_in_memory_is_young_on_disk(tmp_path: Path) -> None:
    stored(tmp_path)
    (path,) = files(tmp_path)
    os.utime(path, (1, 1))
    tier = disk_tier(tmp_path, Blocks())
    tier.keep(chain(1)[0], BLOCK)
    assert path.stat().st_mtime > 10**9
    tier.close()


def test_a_disk_that_does_not_answer_does_not_hold_the_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(DiskFolder, "trim", lambda _: gate.wait(60))
    monkeypatch.setattr(disk_tier_module, "QUEUE_BYTES", 0)
    monkeypatch.setattr(disk_tier_module, "CLOSE_SECONDS", 0.01)
    blocks = Blocks()
    blocks.fill(BLOCK, 1)
    tier = disk_tier(tmp_path, blocks)
    tier.flush_seconds = 0.01
    tier.flush([(node, BLOCK) for node in chain(9)])  # would wait for ever
    assert tier.counts.written == 0
    gate.set()


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_opening_reads_for_a_bounded_time(tmp_path: Path, is_alone: bool) -> None:
    stored(tmp_path, 3)
    now = [0.0]
    folder = DiskFolder(tmp_path, FORMAT.namespace, 10**6)
    tier = DiskTier(folder, FORMAT, Blocks(), clock=lambda: now[0])
    bound = tier.read_seconds if is_alone else tier.read_seconds_beside_others
    first, second, third = chain(3)
    assert tier.begin(is_alone=is_alone)
    assert tier.load(first) is not None
    now[0] += bound - 0.001
    assert tier.load(second) is not None
    now[0] += 0.002
    assert tier.load(third) is None
    assert tier.begin(is_alone=is_alone)
    assert tier.load(third) is not None
    tier.close()


def test_reading_must_be_quicker_than_computing() -> None:
    rule = CostRule()
    rule.note_read(0.002)
    assert rule.allows()  # nothing to compare with
    rule.note_compute(0.001)
    tries = [rule.allows() for _ in range(32)]
    assert tries.count(True) == 2  # it may have become quicker
    for _ in range(20):
        rule.note_read(0.0001)
    assert all(rule.allows() for _ in range(32))


def test_only_steps_with_prompts_say_what_computing_costs(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, Blocks())
    tier.note_step(4.0, 0.5)
    tier.note_step(1.0, 0.5)
    assert tier.cost.compute_seconds == 0.125
    tier.close()
