"""Blocks of the simulated executor's cache: shared prefixes, and the least recently used go first.

The rules are those of the executor: a block is found by its tokens and all tokens before it, the
moment it is full; a hit covers whole blocks and never the last known token; blocks that nobody
holds stay until others need them.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_service.core import KvCounts, SequenceId


@dataclass(slots=True)
class _Sequence:
    # Name of all tokens up to the end of the last full block.
    chain: int
    indexed: list[int] = field(default_factory=list)
    # Full blocks that others had put into the index first, and the one that is not full.
    num_private: int = 0
    tail: list[int] = field(default_factory=list)


class PrefixStore:
    """Counts blocks and finds prefixes; holds no keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start empty."""
        self._num_blocks = num_blocks
        self._size = block_size
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_private = 0
        self._num_shared = 0

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def counts(self) -> KvCounts:
        """Return the counts that an executor reports."""
        free = self._num_blocks - len(self._holders) - self._num_private
        return KvCounts(self._num_blocks, free, len(self._idle), self._num_shared)

    def open(self, name: SequenceId, salt: str, token_ids: Sequence[int]) -> int:
        """Open a sequence; return how many of its tokens are there already."""
        chain = zlib.crc32(salt.encode())
        found: list[int] = []
        for start in range(0, (len(token_ids) - 1) // self._size * self._size, self._size):
            key = hash((chain, *token_ids[start : start + self._size]))
            if key not in self._holders:
                break
            self._hold(key)
            found.append(key)
            chain = key
        self._sequences[name] = _Sequence(chain, found)
        return len(found) * self._size

    def _hold(self, key: int) -> None:
        holders = self._holders[key] = self._holders.get(key, 0) + 1
        if holders == 1:
            self._idle.pop(key, None)
        elif holders == 2:
            self._num_shared += 1

    def release(self, names: Iterable[SequenceId]) -> None:
        """Give sequences back; what is in the index stays there."""
        for name in names:
            sequence = self._sequences.pop(name)
            self._num_private -= sequence.num_private + bool(sequence.tail)
            # The end of a sequence is of less use than its start, so it goes first.
            for key in reversed(sequence.indexed):
                self._holders[key] -= 1
                if self._holders[key] == 1:
                    self._num_shared -= 1
                elif self._holders[key] == 0:
                    self._idle[key] = None

    def grow(self, rows: Mapping[SequenceId, Sequence[int]]) -> bool:
        """Add tokens to sequences, all of them or, for want of blocks, none."""
        size, sequences = self._size, self._sequences
        needed = 0
        for name, tokens in rows.items():
            held = len(sequences[name].tail)
            needed += (held + len(tokens) + size - 1) // size - (held > 0)
        if needed:
            counts = self.counts()
            if needed > counts.free + counts.evictable:
                return False
            for _ in range(needed - counts.free):
                key, _ = self._idle.popitem(last=False)
                del self._holders[key]
        for name, tokens in rows.items():
            sequence = sequences[name]
            if sequence.tail and len(sequence.tail) + len(tokens) < size:
                # Most rows: a token more in a block that is not full.
                sequence.tail.extend(tokens)
            else:
                self._append(sequence, tokens)
        return True

    def _append(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        size = self._size
        self._num_private -= bool(sequence.tail)
        known = [*sequence.tail, *tokens]
        full = len(known) // size * size
        for start in range(0, full, size):
            key = hash((sequence.chain, *known[start : start + size]))
            sequence.chain = key
            if key in self._holders:
                sequence.num_private += 1
                self._num_private += 1
            else:
                self._hold(key)
                sequence.indexed.append(key)
        sequence.tail = known[full:]
        self._num_private += bool(sequence.tail)
