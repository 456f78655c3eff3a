"""Blocks of the cache: a free list and reference counts.

A block without holders is free, or parked: its contents are kept and somebody may hold it again.
This module knows block ids and counts, never sequences and never memory.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

BlockId = NewType("BlockId", int)


class BlockPool:
    """`num_blocks` blocks with reference counts: 0 exactly when a block is free or parked."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"[block_pool] num_blocks must be at least 1, got {num_blocks}")
        self._reference_counts = [0] * num_blocks
        # Oldest first: a released block is used again as late as possible, so that a use after
        # release shows in tests as foreign data instead of by luck as the right one.
        self._free: deque[BlockId] = deque(BlockId(block) for block in range(num_blocks))
        self._parked: set[BlockId] = set()
        self._num_shared = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._reference_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and whose contents nobody wants."""
        return len(self._free)

    @property
    def num_parked_blocks(self) -> int:
        """Blocks that nobody holds and whose contents are kept."""
        return len(self._parked)

    @property
    def num_shared_blocks(self) -> int:
        """Blocks with more than one holder."""
        return self._num_shared

    def reference_count(self, block: BlockId) -> int:
        """Return how many holders a block has."""
        return self._reference_counts[block]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` free blocks with one holder each.

        Raises ValueError when fewer are free: callers ask `num_free_blocks` first, because growth
        is all or nothing.
        """
        if count < 0 or count > len(self._free):
            raise ValueError(
                f"[block_pool] allocate at most the {len(self._free)} free blocks, got {count}"
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add a holder to each block; raises ValueError for a free one, before anything changes."""
        for block in blocks:
            if self._reference_counts[block] < 1 and block not in self._parked:
                raise ValueError(f"[block_pool] retain only blocks in use, got free block {block}")
        for block in blocks:
            self._parked.discard(block)
            self._reference_counts[block] += 1
            if self._reference_counts[block] == 2:
                self._num_shared += 1

    def release(self, blocks: Sequence[BlockId], kept: Container[BlockId] = ()) -> list[BlockId]:
        """Take a holder from each block and return those without any, in the given order.

        Such a block is parked when it is among `kept`, else free. Raises ValueError for a block
        that has no holder already (a double free).
        """
        left: list[BlockId] = []
        for block in blocks:
            count = self._reference_counts[block]
            if count < 1:
                raise ValueError(f"[block_pool] release only blocks in use, got free block {block}")
            self._reference_counts[block] = count - 1
            if count == 2:
                self._num_shared -= 1
            elif count == 1:
                left.append(block)
                if block in kept:
                    self._parked.add(block)
                else:
                    self._free.append(block)
        return left

    def reclaim(self, blocks: Sequence[BlockId]) -> None:
        """Free parked blocks; raises ValueError for one that is not, before anything changes."""
        if not self._parked.issuperset(blocks):
            raise ValueError(f"[block_pool] reclaim only parked blocks, got {list(blocks)[:8]}")
        self._parked.difference_update(blocks)
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError when free list, counts and totals disagree."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("[block_pool] a block is on the free list twice")
        if free & self._parked:
            raise AssertionError("[block_pool] a block is free and parked")
        for block, count in enumerate(self._reference_counts):
            if count < 0 or (count == 0) != (block in free or block in self._parked):
                raise AssertionError(
                    f"[block_pool] block {block} has {count} holders and is "
                    f"{'on' if block in free else 'not on'} the free list"
                )
        shared = sum(count > 1 for count in self._reference_counts)
        if shared != self._num_shared:
            raise AssertionError(
                f"[block_pool] {shared} blocks are shared, counted {self._num_shared}"
            )
