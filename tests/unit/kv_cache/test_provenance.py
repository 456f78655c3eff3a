"""Provenance against plain bookkeeping: every position's step, and what outlives the rings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.provenance import Provenance
from isobatch_kernels.step import PathCount

BLOCK_SIZE = 16
GEMV = (PathCount("linear", "gemv", "vnni", 3, 3),)
GEMM = (PathCount("linear", "gemm", "vnni", 3, 90),)


@dataclass
class _Recorder:
    """Gives steps to a Provenance and keeps them all."""

    provenance: Provenance
    tables: dict[int, list[int]]
    step_id: int = 0
    # (sequence id, position) -> the step and the tokens of that step
    written: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def step(self, *rows: tuple[int, int, int], paths: tuple[PathCount, ...] = GEMV) -> int:
        """Record rows (sequence id, start, number of tokens)."""
        self.step_id += 1
        width = max(len(table) for table in self.tables.values())
        tables = np.full((len(rows), width), -1, np.int32)
        for index, (sequence_id, _, _) in enumerate(rows):
            tables[index, : len(self.tables[sequence_id])] = self.tables[sequence_id]
        total = sum(row[2] for row in rows)
        for sequence_id, start, count in rows:
            for position in range(start, start + count):
                self.written[sequence_id, position] = (self.step_id, total)
        return self.provenance.record(
            self.step_id,
            np.array([row[0] for row in rows], np.uint64),
            np.array([row[1] for row in rows], np.int32),
            np.array([row[2] for row in rows], np.int32),
            tables,
            total,
            len(rows),
            paths,
        )


def _recorder(tables: dict[int, list[int]], num_blocks: int = 8, **kept: int) -> _Recorder:
    provenance = Provenance(num_blocks, BLOCK_SIZE, **kept)
    provenance.begin_epoch(77)
    return _Recorder(provenance, tables)


def test_every_position_names_its_step_and_every_step_its_rows() -> None:
    world = _recorder({5: [3, 1], 9: [6]})
    world.step((5, 0, 14))
    world.step((5, 14, 1), (9, 0, 7), paths=GEMM)
    world.step((9, 7, 1), (5, 15, 1))
    world.step((5, 16, 1))
    provenance = world.provenance
    assert provenance.block(3, 16).position_serials == (1,) * 14 + (2, 3)
    assert provenance.block(1, 1).position_serials == (4,)
    assert provenance.block(6, 8).position_serials == (2,) * 7 + (3,)
    second = provenance.step(2)
    assert second is not None
    assert (second.scheduler_epoch, second.step_id) == (77, 2)
    assert (second.num_tokens, second.num_wanted, second.num_rows) == (8, 2, 2)
    assert (second.sequence_ids.tolist(), second.row_num_tokens.tolist()) == ([5, 9], [1, 7])
    assert [use.path for use in provenance.path_sets[second.path_set]] == ["gemm"]


def test_a_block_says_who_wrote_it_when_and_by_which_paths() -> None:
    world = _recorder({5: [3], 2**64 - 1: [2]})
    world.step((5, 0, 9))
    world.step((5, 9, 1), (2**64 - 1, 0, 5), paths=GEMM)
    world.step((5, 10, 1))
    block = world.provenance.block(3, 11)
    assert (block.writer_id, block.scheduler_epoch) == (5, 77)
    assert (block.first_step_id, block.last_step_id) == (1, 3)
    assert (block.min_step_tokens, block.max_step_tokens) == (1, 9)
    assert block.path_sets == (0, 1)
    assert world.provenance.block(2, 5).writer_id == 2**64 - 1
    assert world.provenance.block(7, 0).writer_id is None


def test_what_was_in_a_block_before_is_forgotten() -> None:
    world = _recorder({5: [3], 6: [3]})
    world.step((5, 0, 16), paths=GEMM)
    world.provenance.block(3, 16)
    world.step((6, 0, 2))
    block = world.provenance.block(3, 2)
    assert (block.writer_id, block.first_step_id, block.max_step_tokens) == (6, 2, 2)
    assert block.path_sets == (1,)
    world.provenance.forget(np.array([3], np.int32))
    assert world.provenance.block(3, 2).writer_id is None
    assert world.provenance.block(3, 2).position_serials == (0, 0)


def test_a_block_that_is_handed_out_has_no_writer_yet() -> None:
    cache = KvCacheManager(1, BLOCK_SIZE, lambda _: None)
    cache.open(5)
    cache.grow({5: 16})
    _Recorder(cache.provenance, {5: [0]}).step((5, 0, 16))
    assert cache.provenance.block(0, 16).writer_id == 5
    cache.release([5])
    cache.open(6)
    cache.grow({6: 1})
    assert cache.provenance.block(0, 16).writer_id is None
    assert cache.provenance.block(0, 16).position_serials == (0,) * 16


def test_a_row_that_goes_back_is_the_writer_of_what_it_writes_again() -> None:
    world = _recorder({5: [0, 1]})
    world.step((5, 0, 20))
    world.step((5, 14, 3))
    assert world.provenance.block(0, 16).position_serials == (1,) * 14 + (2, 2)
    # The second block's first position was written anew, so the rest of it is stale.
    second = world.provenance.block(1, 1)
    assert (second.first_step_id, second.max_step_tokens, second.position_serials) == (2, 3, (2,))


def test_a_block_that_outlives_the_rings_keeps_its_summary() -> None:
    world = _recorder({5: [3], 9: [0, 1, 2]}, steps_kept=8, rows_kept=32)
    world.step((5, 0, 12), paths=GEMM)
    world.step((5, 12, 4), (9, 0, 1))
    before = world.provenance.block(3, 16)
    for position in range(1, 40):
        world.step((9, position, 1))
    after = world.provenance.block(3, 16)
    assert after.position_serials == (0,) * 16
    assert world.provenance.step(2) is None
    assert (after.writer_id, after.first_step_id, after.last_step_id) == (5, 1, 2)
    assert (after.min_step_tokens, after.max_step_tokens) == (5, 12)
    assert after.path_sets == before.path_sets == (0, 1)


def test_blocks_are_summed_up_in_time_without_being_asked() -> None:
    world = _recorder({5: [3], 9: [0, 1, 2]}, steps_kept=8, rows_kept=32)
    world.step((5, 0, 12), paths=GEMM)
    for position in range(40):
        world.step((9, position, 1))
    block = world.provenance.block(3, 12)
    assert (block.writer_id, block.first_step_id, block.max_step_tokens) == (5, 1, 12)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_agree_with_plain_bookkeeping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = {key: [3 * index + part for part in range(3)] for index, key in enumerate((4, 8, 15))}
    world = _recorder(tables, num_blocks=9, rows_kept=1024 if seed % 2 else 40)
    done = dict.fromkeys(tables, 0)
    for _ in range(60):
        rows = []
        for key in rng.permutation(list(tables)):
            back = int(rng.integers(0, 3))
            start = max(0, done[int(key)] - back)
            count = min(int(rng.choice([1, 1, 1, 2, 7])), 48 - start)
            if rng.random() < 0.7 and count > 0:
                rows.append((int(key), start, count))
                done[int(key)] = start + count
        if rows:
            world.step(*rows, paths=GEMM if len(rows) > 1 else GEMV)
    for key, blocks in tables.items():
        for index, block in enumerate(blocks):
            start = index * BLOCK_SIZE
            count = min(BLOCK_SIZE, done[key] - start)
            if count <= 0:
                continue
            record = world.provenance.block(block, count)
            expected = [world.written[key, start + slot] for slot in range(count)]
            found = [world.provenance.step(serial) for serial in record.position_serials]
            for step, (step_id, total) in zip(found, expected, strict=True):
                # Of rows that have left the ring nothing is said, and nothing wrong.
                assert step is None or (step.step_id, step.num_tokens) == (step_id, total)
                assert step is not None or seed % 2 == 0
            assert record.writer_id == key
            assert record.last_step_id == max(step_id for step_id, _ in expected)
            assert record.max_step_tokens >= max(total for _, total in expected)


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_entered_together_leave_what_single_ones_leave(seed: int) -> None:
    """Blocks change hands between steps that are put aside, and some positions are rewritten."""
    rng = np.random.default_rng(seed)
    worlds = [_recorder({4: [0, 1], 8: [2, 3], 15: [4, 5]}) for _ in range(2)]
    tables = worlds[1].tables = worlds[0].tables
    spare = [6, 7]
    for _ in range(200):
        if rng.random() < 0.2:
            key, part = int(rng.choice(list(tables))), int(rng.integers(2))
            block, tables[key] = tables[key][part], list(tables[key])
            tables[key][part] = spare.pop(0)
            spare.append(block)
            for world in worlds:
                world.provenance.forget(np.array([tables[key][part]], np.int32))
        keys = rng.permutation(list(tables))[: int(rng.integers(1, 4))].tolist()
        rows = [(key, int(rng.integers(0, 24)), int(rng.choice([1, 1, 8]))) for key in keys]
        if rng.random() < 0.5:
            rows = [(key, start, 1) for key, start, _ in rows]
        together, single = (world.step(*rows) for world in worlds)
        assert together == single
        assert worlds[1].provenance.step(single) is not None  # asking enters it
    for block in range(8):
        one, other = (world.provenance.block(block, BLOCK_SIZE) for world in worlds)
        assert one == other, block
    steps = [worlds[0].provenance.step(serial) for serial in range(1, 201)]
    for step, expected in zip(steps, (worlds[1].provenance.step(i + 1) for i in range(200)),
                              strict=True):  # fmt: skip
        assert step is not None
        assert expected is not None
        assert step.step_id == expected.step_id
        assert step.sequence_ids.tolist() == expected.sequence_ids.tolist()
        assert step.row_num_tokens.tolist() == expected.row_num_tokens.tolist()
