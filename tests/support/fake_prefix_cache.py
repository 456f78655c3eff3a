"""Blocks with holders and a prefix index, counted as the executor's contract says.

Shared by the synchronous block pool and the fake executor. A block enters the index the moment
it is full, stays there when its last holder leaves, and is evicted, least recently left first,
when free ones run out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from scheduler_service.core import KvCounts


@dataclass(slots=True)
class _Held:
    salt: str
    token_ids: list[int]
    blocks: list[int]
    # Blocks that have been offered to the index.
    num_indexed: int


@dataclass(slots=True)
class FakePrefixCache:
    """Tokens and blocks of open sequences.

    Attributes:
        block_size: Positions of a block.
        num_blocks: Blocks of the pool.
        is_shared: Whether prefixes are found at all.
    """

    block_size: int
    num_blocks: int
    is_shared: bool = True
    _held: dict[int, _Held] = field(default_factory=dict)
    _num_holders: dict[int, int] = field(default_factory=dict)
    # Full blocks by salt and all tokens up to their end, and the other way round.
    _index: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    _keys: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    # Blocks that the index alone holds, least recently left first.
    _evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _next_block: int = 0

    def clear(self) -> None:
        """Lose everything."""
        for each in (self._held, self._num_holders, self._index, self._keys, self._evictable):
            each.clear()

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_used(self) -> int:
        """Blocks that open sequences hold."""
        return len(self._num_holders)

    def tokens(self, sequence_id: int) -> list[int]:
        """Return the cached tokens of an open sequence."""
        return self._held[sequence_id].token_ids

    def open(self, sequence_id: int, salt: str, token_ids: Sequence[int], most: int) -> int:
        """Open a sequence; return its cached positions, whole blocks and at most `most`."""
        blocks: list[int] = []
        size = self.block_size
        while self.is_shared and (len(blocks) + 1) * size <= min(most, len(token_ids)):
            block = self._index.get((salt, tuple(token_ids[: (len(blocks) + 1) * size])))
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self._num_holders[block] = self._num_holders.get(block, 0) + 1
            self._evictable.pop(block, None)
        num_cached = len(blocks) * size
        self._held[sequence_id] = _Held(salt, list(token_ids[:num_cached]), blocks, len(blocks))
        return num_cached

    def release(self, sequence_id: int) -> None:
        """Give a sequence back; one that is not open is ignored."""
        held = self._held.pop(sequence_id, None)
        for block in reversed(held.blocks) if held else ():
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                del self._num_holders[block]
                if block in self._keys:
                    self._evictable[block] = None

    def grow(
        self,
        new_tokens: Mapping[int, Sequence[int]],
        num_drafts: Mapping[int, int] = MappingProxyType({}),
    ) -> bool:
        """Append tokens to sequences, to all of them or to none where blocks run out.

        The last `num_drafts` of a sequence's tokens may be taken back, so they fill no block for
        the index; what is appended later confirms them.
        """
        size = self.block_size
        missing = {}
        for sequence_id, tokens in new_tokens.items():
            held = self._held[sequence_id]
            num_needed = -(-(len(held.token_ids) + len(tokens)) // size)
            missing[sequence_id] = max(0, num_needed - len(held.blocks))
        counts = self.counts()
        if sum(missing.values()) > counts.free + counts.evictable:
            return False
        for sequence_id, tokens in new_tokens.items():
            held = self._held[sequence_id]
            held.blocks += [self._allocate() for _ in range(missing[sequence_id])]
            held.token_ids += tokens
            num_confirmed = len(held.token_ids) - num_drafts.get(sequence_id, 0)
            first, held.num_indexed = held.num_indexed, num_confirmed // size
            for index in range(first, held.num_indexed):
                key = (held.salt, tuple(held.token_ids[: (index + 1) * size]))
                if key not in self._index:
                    self._index[key] = held.blocks[index]
                    self._keys[held.blocks[index]] = key
        return True

    def take_back(self, sequence_id: int, num_tokens: int) -> None:
        """Shorten a sequence to `num_tokens` tokens; it keeps its blocks."""
        held = self._held[sequence_id]
        assert held.num_indexed * self.block_size <= num_tokens, "no indexed block is written to"
        del held.token_ids[num_tokens:]

    def _allocate(self) -> int:
        if self.counts().free == 0:
            evicted, _ = self._evictable.popitem(last=False)
            del self._index[self._keys.pop(evicted)]
        self._next_block += 1
        self._num_holders[self._next_block] = 1
        return self._next_block

    def counts(self) -> KvCounts:
        """Return the counts of blocks."""
        num_evictable = len(self._evictable)
        # Below 0 only where a test took blocks away.
        free = max(0, self.num_blocks - self.num_used - num_evictable)
        num_shared = sum(count > 1 for count in self._num_holders.values())
        return KvCounts(self.num_blocks, free, num_evictable, num_shared)
