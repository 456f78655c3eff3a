"""Sequences grow together or not at all, cleared blocks only, and give everything back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from executor_service.kv_cache.block_pool import BlockId
from executor_service.kv_cache.block_table import BlockTable, blocks_for
from executor_service.kv_cache.manager import KvCacheManager, KvOccupancy


class _Zeroed:
    """Remembers which blocks were cleared."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def __call__(self, blocks: npt.NDArray[np.int32]) -> None:
        assert blocks.dtype == np.int32
        self.blocks.extend(blocks.tolist())


def _manager(num_blocks: int = 4) -> tuple[KvCacheManager, _Zeroed]:
    zeroed = _Zeroed()
    return KvCacheManager(num_blocks, 16, zeroed), zeroed


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_opening_reserves_nothing() -> None:
    manager, zeroed = _manager()
    assert manager.open(1) == 0
    assert manager.occupancy() == KvOccupancy(4, 4, 0, 0)
    assert zeroed.blocks == []


def test_growth_clears_exactly_the_new_blocks() -> None:
    manager, zeroed = _manager()
    manager.open(1)
    assert manager.grow({1: 17})
    first = manager.block_tables([1])[0].tolist()
    assert zeroed.blocks == first
    assert manager.grow({1: 33})
    assert zeroed.blocks == manager.block_tables([1])[0].tolist()
    assert manager.grow({1: 20})  # less than it has: nothing happens
    assert manager.num_blocks_of(1) == 3
    manager.check_integrity()


def test_growth_is_all_or_nothing() -> None:
    manager, zeroed = _manager()
    manager.open(1)
    manager.open(2)
    assert manager.grow({1: 16})
    before = list(zeroed.blocks)
    assert not manager.grow({1: 32, 2: 48})
    assert (manager.num_blocks_of(1), manager.num_blocks_of(2)) == (1, 0)
    assert zeroed.blocks == before
    assert manager.grow({1: 32, 2: 32})
    assert manager.occupancy().free_blocks == 0
    manager.check_integrity()


def test_release_ignores_unknown_sequences_and_may_be_repeated() -> None:
    manager, _ = _manager()
    manager.open(1)
    manager.grow({1: 64})
    manager.release([7, 1, 1])
    manager.release([1])
    assert manager.occupancy().free_blocks == 4
    assert manager.num_sequences == 0
    manager.check_integrity()


def test_tables_are_padded() -> None:
    manager, _ = _manager()
    manager.open(1)
    manager.open(2)
    manager.grow({1: 33, 2: 1})
    tables = manager.block_tables([2, 1])
    assert tables.shape == (2, 3)
    assert tables.dtype == np.int32
    assert tables[0, 1:].tolist() == [-1, -1]
    assert len({*tables[0, :1].tolist(), *tables[1].tolist()}) == 4


def test_opening_twice_and_growing_a_closed_sequence_are_bugs() -> None:
    manager, _ = _manager()
    manager.open(1)
    with pytest.raises(ValueError, match="open a sequence once, got 1 again"):
        manager.open(1)
    with pytest.raises(KeyError):
        manager.grow({1: 1, 2: 1})
    assert manager.occupancy().free_blocks == 4


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be 16 or 32, got 8"):
        KvCacheManager(4, 8, _Zeroed())


def test_a_table_grows_past_its_first_room() -> None:
    table = BlockTable()
    for start in range(0, 40, 5):
        table.extend([BlockId(block) for block in range(start, start + 5)])
    assert table.row.tolist() == list(table.blocks) == list(range(40))


def test_integrity_sees_a_block_in_two_tables() -> None:
    manager, _ = _manager()
    manager.open(1)
    manager.open(2)
    manager.grow({1: 16})
    manager._sequences[2].table.extend(manager._sequences[1].table.blocks)
    with pytest.raises(AssertionError, match="is in 2 tables and has 1 holders"):
        manager.check_integrity()
