"""Who holds which blocks: sequences grow all together or not at all, and give everything back.

The manager knows block ids and the number of positions of each sequence. It never touches keys and
values: clearing a block is a callable of its owner. A prefix index will later hand blocks to
`open`; until then nothing is found and every sequence starts at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from executor_service.kv_cache.block_pool import BlockId, BlockPool
from executor_service.kv_cache.block_table import BlockTable, blocks_for
from executor_service.kv_cache.provenance import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KvOccupancy:
    """Counts of blocks."""

    total_blocks: int
    free_blocks: int
    evictable_blocks: int  # held by the prefix index alone: free on demand
    shared_blocks: int  # held by more than one sequence


class KvCacheManager:
    """Block tables of the open sequences over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        zero_blocks: Callable[[npt.NDArray[np.int32]], None],
    ) -> None:
        """Manage `num_blocks` blocks of `block_size` positions.

        `zero_blocks` clears the keys and values of (n,) int32 block ids; it is called for every
        block that is handed out, before a row can read it.
        """
        if block_size not in (16, 32):
            raise ValueError(f"[kv_cache] block_size must be 16 or 32, got {block_size}")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._zero_blocks = zero_blocks
        self.provenance = Provenance(num_blocks, block_size)
        self._tables: dict[int, BlockTable] = {}
        # The tables that were asked for last, until one of them changes: from one decode step to
        # the next they seldom do.
        self._asked_ids: tuple[int, ...] = ()
        self._asked: npt.NDArray[np.int32] | None = None

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._tables)

    def occupancy(self) -> KvOccupancy:
        """Return the counts of blocks."""
        return KvOccupancy(
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free_blocks,
            evictable_blocks=0,
            shared_blocks=self._pool.num_shared_blocks,
        )

    def open(self, sequence_id: int, prefix: Sequence[BlockId] = ()) -> int:
        """Open a sequence, holding the blocks of a found prefix; reserves nothing.

        Returns the number of its positions that are cached already. Raises ValueError when it is
        open.
        """
        if sequence_id in self._tables:
            raise ValueError(f"[kv_cache] open a sequence once, got {sequence_id} again")
        self._pool.retain(prefix)
        self._asked = None
        table = BlockTable()
        table.extend(prefix)
        self._tables[sequence_id] = table
        return len(prefix) * self.block_size

    def grow(self, num_tokens: Mapping[int, int]) -> bool:
        """Make room for `num_tokens` positions of each sequence, for all of them or for none.

        Returns False, with nothing changed, when the pool has too few free blocks. A sequence that
        has more room already keeps it. Raises KeyError for a sequence that is not open.
        """
        missing = {
            sequence_id: count
            for sequence_id, tokens in num_tokens.items()
            if (count := blocks_for(tokens, self.block_size) - len(self._tables[sequence_id])) > 0
        }
        total = sum(missing.values())
        if total > self._pool.num_free_blocks:
            return False
        if total == 0:
            return True
        blocks = self._pool.allocate(total)
        self._asked = None
        ids = np.asarray(blocks, np.int32)
        self._zero_blocks(ids)
        self.provenance.forget(ids)
        start = 0
        for sequence_id, count in missing.items():
            self._tables[sequence_id].extend(blocks[start : start + count])
            start += count
        return True

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Give sequences back; ids that are not open are ignored."""
        self._asked = None
        for sequence_id in sequence_ids:
            table = self._tables.pop(sequence_id, None)
            if table is not None:
                # Last block first: the first ones, which prefixes share, are used again last.
                self._pool.release(list(reversed(table.blocks)))

    def release_all(self) -> None:
        """Give every sequence back."""
        self.release(list(self._tables))

    def num_blocks_of(self, sequence_id: int) -> int:
        """Return how many blocks an open sequence holds."""
        return len(self._tables[sequence_id])

    def block_tables(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return (len(sequence_ids), max_blocks) int32 block ids, -1 past each sequence's end.

        Read-only: the same array is returned again while nothing changes.
        """
        ids = tuple(sequence_ids)
        if self._asked is not None and ids == self._asked_ids:
            return self._asked
        rows = [self._tables[sequence_id].row for sequence_id in sequence_ids]
        width = max((len(row) for row in rows), default=0)
        tables = np.full((len(rows), max(width, 1)), -1, np.int32)
        for index, row in enumerate(rows):
            tables[index, : len(row)] = row
        tables.setflags(write=False)
        self._asked_ids, self._asked = ids, tables
        return tables

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, counts and free list disagree."""
        self._pool.check_integrity()
        holders = [0] * self._pool.num_blocks
        for sequence_id, table in self._tables.items():
            if len(set(table.blocks)) != len(table):
                raise AssertionError(f"[kv_cache] sequence {sequence_id} holds a block twice")
            if list(table.row) != list(table.blocks):
                raise AssertionError(f"[kv_cache] row and blocks of {sequence_id} differ")
            for block in table.blocks:
                holders[block] += 1
        for index, count in enumerate(holders):
            expected = self._pool.reference_count(BlockId(index))
            if count != expected:
                raise AssertionError(
                    f"[kv_cache] block {index} is in {count} tables and has {expected} holders"
                )
