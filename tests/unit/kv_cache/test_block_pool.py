"""Blocks: counts, the free list, and the misuse that must be loud."""

from __future__ import annotations

import pytest

from executor_service.kv_cache.block_pool import BlockId, BlockPool


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_more_than_the_free_blocks_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="at most the 2 free blocks, got 3"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.retain(blocks[:1])
    assert pool.num_shared_blocks == 1
    assert pool.release(blocks) == blocks[1:]
    assert pool.num_shared_blocks == 0
    assert pool.release(blocks[:1]) == blocks[:1]
    assert pool.num_free_blocks == 2
    pool.check_integrity()


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match=f"release only blocks in use, got free block {blocks[0]}"):
        pool.release(blocks)


def test_a_free_block_cannot_be_retained() -> None:
    pool = BlockPool(2)
    used = pool.allocate(1)
    free = BlockId(1 - used[0])
    with pytest.raises(ValueError, match="retain only blocks in use"):
        pool.retain([*used, free])
    assert pool.reference_count(used[0]) == 1


def test_a_parked_block_is_held_again_or_reclaimed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert pool.release(blocks, kept=blocks[:1]) == blocks
    assert (pool.num_free_blocks, pool.num_parked_blocks) == (2, 1)
    pool.check_integrity()
    pool.retain(blocks[:1])
    assert (pool.num_free_blocks, pool.num_parked_blocks) == (2, 0)
    pool.release(blocks[:1], kept=blocks)
    with pytest.raises(ValueError, match="reclaim only parked blocks"):
        pool.reclaim(blocks)
    pool.reclaim(blocks[:1])
    assert (pool.num_free_blocks, pool.num_parked_blocks) == (3, 0)
    pool.check_integrity()


def test_released_blocks_are_used_again_last() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert not set(pool.allocate(2)) & set(blocks)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


def test_integrity_sees_damage() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._reference_counts[2] = 1
    with pytest.raises(AssertionError, match="block 2 has 1 holders and is on the free list"):
        pool.check_integrity()
