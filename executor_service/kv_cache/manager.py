"""Who holds which blocks: sequences grow all together or not at all, and give everything back.

The manager knows block ids and the tokens of each sequence as far as they fill blocks. It never
touches keys and values: clearing a block is a callable of its owner. With a prefix index, a
sequence starts with the blocks that others have filled with its first tokens, and a block outlives
its sequence until its place is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from executor_service.kv_cache.block_pool import BlockId, BlockPool
from executor_service.kv_cache.block_table import BlockTable, blocks_for
from executor_service.kv_cache.provenance import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from executor_service.kv_cache.chain import ChainNode
    from executor_service.kv_cache.prefix_index import PrefixIndex

_TOKEN_BYTES: Final = 4  # int32


@dataclass(frozen=True, slots=True)
class KvOccupancy:
    """Counts of blocks."""

    total_blocks: int
    free_blocks: int
    evictable_blocks: int  # held by the prefix index alone: free on demand
    shared_blocks: int  # held by more than one sequence


class Tier(Protocol):
    """Keeps blocks that leave memory (disk_cache.tier.DiskTier)."""

    def begin(self, *, is_alone: bool) -> bool:
        """Begin to load for an opening; False when that is not worth it.

        `is_alone` says whether no other sequence is open.
        """
        ...

    def load(self, node: ChainNode) -> npt.NDArray[np.uint16] | None:
        """Return a block's bits, if they are there."""
        ...

    def put(self, block: BlockId, bits: npt.NDArray[np.uint16]) -> None:
        """Put loaded bits into a block of the pool."""
        ...

    def keep(self, node: ChainNode, block: BlockId) -> None:
        """Take a block that is about to leave memory."""
        ...

    def note_step(self, num_blocks: float, seconds: float) -> None:
        """Note how long it took to compute the tokens of so many blocks."""
        ...


@dataclass(slots=True, eq=False)
class _Sequence:
    """An open sequence. Without an index it is only its table."""

    table: BlockTable
    # The chain of its full, confirmed blocks; None for none, and without an index.
    node: ChainNode | None = None
    # Positions in those blocks: they may be others' too, so nobody writes there again.
    num_fixed: int = 0
    # Tokens behind them, int32 bytes.
    pending: bytearray | None = None  # None: nothing more of this sequence is to be shared


class KvCacheManager:
    """Block tables of the open sequences over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        zero_blocks: Callable[[npt.NDArray[np.int32]], None],
        index: PrefixIndex | None = None,
        tier: Tier | None = None,
    ) -> None:
        """Manage `num_blocks` blocks of `block_size` positions.

        `zero_blocks` clears the keys and values of (n,) int32 block ids; it is called for every
        block that is handed out, before a row can read it. Without `index` nothing is shared;
        `tier` takes what leaves the index and gives it back.
        """
        if block_size not in (16, 32):
            raise ValueError(f"[kv_cache] block_size must be 16 or 32, got {block_size}")
        self.block_size = block_size
        self.index = index
        self._tier = tier
        self._pool = BlockPool(num_blocks)
        self._zero_blocks = zero_blocks
        self.provenance = Provenance(num_blocks, block_size)
        self._sequences: dict[int, _Sequence] = {}
        # The tables that were asked for last, until one of them changes: from one decode step to
        # the next they seldom do.
        self._asked_ids: tuple[int, ...] = ()
        self._asked: npt.NDArray[np.int32] | None = None

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def occupancy(self) -> KvOccupancy:
        """Return the counts of blocks."""
        pool = self._pool
        return KvOccupancy(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free_blocks,
            evictable_blocks=pool.num_parked_blocks,
            shared_blocks=pool.num_shared_blocks,
        )

    def open(
        self,
        sequence_id: int,
        salt: str = "",
        token_ids: npt.NDArray[np.int32] | None = None,
        max_cached_tokens: int = 0,
    ) -> int:
        """Open a sequence, holding the blocks that its tokens share; reserves nothing else.

        `token_ids` (num_tokens,) are its first tokens. Returns the number of positions that are
        cached already: whole blocks, at most `max_cached_tokens` and at most num_tokens - 1.
        Raises ValueError when it is open.
        """
        if sequence_id in self._sequences:
            raise ValueError(f"[kv_cache] open a sequence once, got {sequence_id} again")
        sequence = _Sequence(BlockTable())
        if self.index is not None:
            sequence.node = self.index.chains.root(salt)
            if sequence.node is not None:
                sequence.pending = bytearray()
            if token_ids is not None and max_cached_tokens > 0 and len(token_ids) > 1:
                most = min(max_cached_tokens, len(token_ids) - 1)
                try:
                    self._share(self.index, sequence, salt, token_ids[:most])
                except BaseException:
                    self._release(sequence)
                    raise
        self._sequences[sequence_id] = sequence
        return sequence.num_fixed

    def _share(
        self,
        index: PrefixIndex,
        sequence: _Sequence,
        salt: str,
        token_ids: npt.NDArray[np.int32],
    ) -> None:
        raw = token_ids.astype("<i4", copy=False).tobytes()
        num_loaded, is_alone = 0, not self._sequences
        tier = self._tier
        for node in index.find(salt, raw, self.block_size * _TOKEN_BYTES):
            block = index.block_of(node)
            if block is not None:
                if self._pool.reference_count(block) == 0:
                    index.pin(block)
                self._pool.retain([block])
            else:
                if tier is None or (num_loaded == 0 and not tier.begin(is_alone=is_alone)):
                    break
                block = self._load(index, tier, node)
                if block is None:
                    break
                num_loaded += 1
            sequence.table.extend([block])
            sequence.node = node
            sequence.num_fixed += self.block_size
        size, counts = self.block_size, index.counts
        counts.lookups_hit += sequence.num_fixed > 0
        counts.lookups_missed += sequence.num_fixed == 0
        counts.tokens_hit += sequence.num_fixed - num_loaded * size
        counts.tokens_hit_on_disk += num_loaded * size
        counts.tokens_missed += len(token_ids) - sequence.num_fixed

    def _load(self, index: PrefixIndex, tier: Tier, node: ChainNode) -> BlockId | None:
        """Bring a block back into memory, with one holder; None where that cannot be."""
        bits = tier.load(node)
        if bits is None or not self._make_free(1):
            return None
        (block,) = self._pool.allocate(1)
        try:
            tier.put(block, bits)
        except BaseException:
            self._pool.release([block])
            raise
        self.provenance.forget(np.array([block], np.int32))
        index.add(node, block)
        return block

    def grow(self, num_tokens: Mapping[int, int]) -> bool:
        """Make room for `num_tokens` positions of each sequence, for all of them or for none.

        Returns False, with nothing changed, when the pool has too few blocks that are free or
        evictable. A sequence that has more room already keeps it. Raises KeyError for a sequence
        that is not open.
        """
        missing = {
            sequence_id: count
            for sequence_id, tokens in num_tokens.items()
            if (
                count := blocks_for(tokens, self.block_size)
                - len(self._sequences[sequence_id].table)
            )
            > 0
        }
        total = sum(missing.values())
        if total == 0:
            return True
        if not self._make_free(total):
            return False
        blocks = self._pool.allocate(total)
        self._asked = None
        ids = np.asarray(blocks, np.int32)
        self._zero_blocks(ids)
        self.provenance.forget(ids)
        start = 0
        for sequence_id, count in missing.items():
            self._sequences[sequence_id].table.extend(blocks[start : start + count])
            start += count
        return True

    def _make_free(self, count: int) -> bool:
        """Evict until `count` blocks are free; False, with nothing changed, when they cannot be."""
        pool = self._pool
        short = count - pool.num_free_blocks
        if short > pool.num_parked_blocks:
            return False
        if self.index is None:
            return True
        for _ in range(short):
            block, node = self.index.evict()
            if self._tier is not None:
                self._tier.keep(node, block)
            pool.reclaim([block])
        return True

    def written(self, sequence_id: int, start: int, tokens: bytes, num_confirmed: int) -> int:
        """Note what a computed row wrote: int32 `tokens` at positions from `start` on.

        Positions below `num_confirmed` will not be taken back; those below `start` neither. Blocks
        that are full of such positions may be shared from now on. Returns the first position that
        the sequence may still write to. Call it for finite rows only.
        """
        sequence = self._sequences[sequence_id]
        pending = sequence.pending
        if pending is None:
            return sequence.num_fixed
        del pending[(start - sequence.num_fixed) * _TOKEN_BYTES :]
        pending += tokens
        while num_confirmed - sequence.num_fixed >= self.block_size and self._fill(sequence):
            pass
        return sequence.num_fixed

    def _fill(self, sequence: _Sequence) -> bool:
        """Enter the first block of the pending tokens; False when nothing more can be shared."""
        index, node, pending = self.index, sequence.node, sequence.pending
        if index is None or node is None or pending is None:
            return False
        size = self.block_size * _TOKEN_BYTES
        child = index.chains.child(node, bytes(pending[:size]))
        if child is None:
            sequence.pending = None
            return False
        del pending[:size]
        index.add(child, sequence.table.blocks[sequence.num_fixed // self.block_size])
        sequence.node = child
        sequence.num_fixed += self.block_size
        return True

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step of `num_tokens` tokens took to compute."""
        if self._tier is not None:
            self._tier.note_step(num_tokens / self.block_size, seconds)

    def stop_sharing(self, sequence_id: int) -> None:
        """Keep what a sequence will write to itself: its state is not finite."""
        self._sequences[sequence_id].pending = None

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Give sequences back; ids that are not open are ignored."""
        self._asked = None
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        # Last block first: the first ones, which prefixes share, are taken last.
        blocks = list(reversed(sequence.table.blocks))
        index = self.index
        if index is None:
            self._pool.release(blocks)
            return
        num_open = len(blocks) - sequence.num_fixed // self.block_size
        self._pool.release(blocks[:num_open])
        node = sequence.node
        for block in blocks[num_open:]:
            if node is None:  # never: a chain has a node for each fixed block
                raise AssertionError(f"[kv_cache] block {block} must have a node, got none")
            # An equal block that was there first has gone, or was used as much as this one.
            if not index.add(node, block):
                index.touch(node)
            if self._pool.release([block], kept=index) and block in index:
                index.park(block)
            node = node.parent

    def release_all(self) -> None:
        """Give every sequence back; what is in the index stays."""
        self.release(list(self._sequences))

    def blocks_of(self, sequence_id: int) -> Sequence[BlockId]:
        """Return the blocks of an open sequence, in the order of positions."""
        return self._sequences[sequence_id].table.blocks

    def num_blocks_of(self, sequence_id: int) -> int:
        """Return how many blocks an open sequence holds."""
        return len(self._sequences[sequence_id].table)

    def block_tables(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return (len(sequence_ids), max_blocks) int32 block ids, -1 past each sequence's end.

        Read-only: the same array is returned again while nothing changes.
        """
        ids = tuple(sequence_ids)
        if self._asked is not None and ids == self._asked_ids:
            return self._asked
        rows = [self._sequences[sequence_id].table.row for sequence_id in sequence_ids]
        width = max((len(row) for row in rows), default=0)
        tables = np.full((len(rows), max(width, 1)), -1, np.int32)
        for index, row in enumerate(rows):
            tables[index, : len(row)] = row
        tables.setflags(write=False)
        self._asked_ids, self._asked = ids, tables
        return tables

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, counts, free list and index disagree."""
        self._pool.check_integrity()
        holders = [0] * self._pool.num_blocks
        for sequence_id, sequence in self._sequences.items():
            table = sequence.table
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
        if self.index is not None:
            self.index.check_integrity()
            parked = set(self.index.evictable())
            if len(parked) != self._pool.num_parked_blocks or any(map(holders.__getitem__, parked)):
                raise AssertionError("[kv_cache] evictable blocks and parked blocks differ")
