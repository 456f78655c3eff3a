"""Random lives of sequences: after every action the cache is whole and agrees with a model.

The model is a pool of plain lists: what each block holds (a tenant and all tokens up to the block's
end), and which blocks each sequence has. Nothing is ever found that is not there, and whatever an
open sequence has confirmed is found by the next one. A second tier takes what leaves memory, and
forgets some of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from executor_service.kv_cache.block_pool import BlockId
from executor_service.kv_cache.chain import CacheIdentity, ChainNode, Chains
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.prefix_index import PrefixIndex

NUM_BLOCKS = 12
SEQUENCES = st.integers(0, 5)
# Few beginnings, so that sequences meet; every tenant has the same texts.
TEXTS = [[first] * 16 + [second] * 17 + [first] * 20 for first in (1, 2) for second in (1, 2)]


@dataclass
class Sequence:
    """An open sequence of the model."""

    salt: str
    text: list[int]
    num_confirmed: int
    blocks: list[int] = field(default_factory=list)


class ForgetfulTier:
    """Implements manager.Tier on the model's contents."""

    def __init__(self, machine: KvCacheMachine) -> None:
        self.machine = machine
        self.kept: dict[bytes, tuple[str, list[int]]] = {}
        self.loads = 0

    def begin(self, *, is_alone: bool) -> bool:
        assert is_alone == (not self.machine.held)
        return self.loads % 7 != 6

    def load(self, node: ChainNode) -> npt.NDArray[np.uint16] | None:
        self.loads += 1
        if self.loads % 5 == 4 or node.digest not in self.kept:
            return None
        return np.frombuffer(node.digest, np.uint16)

    def put(self, block: BlockId, bits: npt.NDArray[np.uint16]) -> None:
        held = {each for sequence in self.machine.held.values() for each in sequence.blocks}
        assert block not in held
        self.machine.contents[block] = self.kept[bits.tobytes()]
        self.machine.dirty.add(block)

    def keep(self, node: ChainNode, block: BlockId) -> None:
        self.kept[node.digest] = self.machine.contents[block]

    def note_step(self, num_blocks: float, seconds: float) -> None:
        raise AssertionError("nobody computes here")


class KvCacheMachine(RuleBasedStateMachine):
    """Open, grow, write, take back, release."""

    def __init__(self) -> None:
        super().__init__()
        self.dirty = set(range(NUM_BLOCKS))  # blocks that hold somebody's old keys and values
        self.contents: dict[int, tuple[str, list[int]]] = {}
        self.held: dict[int, Sequence] = {}

    @initialize(block_size=st.sampled_from((16, 32)), shares=st.booleans(), has_tier=st.booleans())
    def build(self, block_size: int, shares: bool, has_tier: bool) -> None:
        self.size = block_size
        identity = CacheIdentity("X1", "f16", "w", "c", block_size)
        index = PrefixIndex(Chains(identity)) if shares else None
        self.tier = ForgetfulTier(self) if has_tier else None
        self.cache = KvCacheManager(NUM_BLOCKS, block_size, self._zero, index, self.tier)

    def _zero(self, blocks: npt.NDArray[np.int32]) -> None:
        self.dirty -= set(blocks.tolist())

    def _table(self, sequence_id: int) -> list[int]:
        row = self.cache.block_tables([sequence_id])[0].tolist()
        return [block for block in row if block >= 0]

    def _num_sure(self, salt: str, text: list[int], most: int) -> int:
        """Positions that open sequences hold for sure, and so must be found."""
        sure = {
            (each.salt, tuple(each.text[:end]))
            for each in self.held.values()
            for end in range(self.size, each.num_confirmed + 1, self.size)
        }
        count = 0
        while (end := count + self.size) <= most and (salt, tuple(text[:end])) in sure:
            count = end
        return count

    @rule(
        sequence_id=SEQUENCES,
        salt=st.sampled_from(("", "a", "b")),
        text=st.sampled_from(TEXTS),
        length=st.integers(0, 53),
        most=st.sampled_from((0, 15, 16, 40, 99)),
    )
    def open(self, sequence_id: int, salt: str, text: list[int], length: int, most: int) -> None:
        if sequence_id in self.held:
            return
        limit = max(0, min(most, length - 1))
        before = self.cache.occupancy()
        sure = self._num_sure(salt, text, limit) if self.cache.index is not None else 0
        cached = self.cache.open(sequence_id, salt, np.array(text[:length], np.int32), most)
        assert cached % self.size == 0
        assert sure <= cached <= limit
        blocks = self._table(sequence_id)
        for index, block in enumerate(blocks):
            assert self.contents[block] == (salt, text[: self.size * (index + 1)])
        if self.tier is None:
            assert self.cache.occupancy().free_blocks == before.free_blocks
        self.held[sequence_id] = Sequence(salt, text, cached, blocks)

    @rule(lengths=st.dictionaries(SEQUENCES, st.integers(1, 100), min_size=1))
    def grow(self, lengths: dict[int, int]) -> None:
        self._grow({key: length for key, length in lengths.items() if key in self.held})

    def _grow(self, wanted: dict[int, int]) -> bool:
        before = {key: self._table(key) for key in self.held}
        missing = sum(
            max(0, -(-length // self.size) - len(self.held[key].blocks))
            for key, length in wanted.items()
        )
        counts = self.cache.occupancy()
        room = counts.free_blocks + counts.evictable_blocks
        assert self.cache.grow(wanted) == (missing <= room)
        held = {block for table in before.values() for block in table}
        for key, table in before.items():
            now = self._table(key)
            assert now[: len(table)] == table
            if missing > room or key not in wanted:
                assert now == table
            else:
                assert self.size * len(now) >= wanted[key]
            fresh = now[len(table) :]
            assert not held & set(fresh)
            held |= set(fresh)
            assert not self.dirty & set(fresh)
            self.dirty |= set(fresh)  # rows are written to them
            for block in fresh:
                self.contents.pop(block, None)
            self.held[key].blocks = now
        return missing <= room

    @rule(
        sequence_id=SEQUENCES,
        count=st.integers(1, 40),
        num_drafts=st.integers(0, 20),
    )
    def write(self, sequence_id: int, count: int, num_drafts: int) -> None:
        """Write true tokens in place of the last drafts, and then other wrong drafts."""
        if sequence_id not in self.held:
            return
        sequence = self.held[sequence_id]
        start = sequence.num_confirmed
        true = sequence.text[start : start + count]
        if not true:
            return
        end = start + len(true)
        if not self._grow({sequence_id: end + num_drafts}):
            return
        row = np.array([*true, *[9] * num_drafts], np.int32)
        fixed = self.cache.written(sequence_id, start, row.tobytes(), end)
        assert fixed == (end // self.size * self.size if self.cache.index is not None else 0)
        sequence.num_confirmed = end
        for index in range(start // self.size, end // self.size):
            tokens = sequence.text[: self.size * (index + 1)]
            self.contents[sequence.blocks[index]] = (sequence.salt, tokens)

    @rule(sequence_ids=st.lists(SEQUENCES, max_size=3))
    def release(self, sequence_ids: list[int]) -> None:
        self.cache.release(sequence_ids)
        for sequence_id in sequence_ids:
            self.held.pop(sequence_id, None)

    @rule()
    def release_all(self) -> None:
        self.cache.release_all()
        self.held.clear()

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        holders = [block for each in self.held.values() for block in each.blocks]
        counts = self.cache.occupancy()
        used = counts.total_blocks - counts.free_blocks - counts.evictable_blocks
        assert used == len(set(holders))
        assert counts.shared_blocks == sum(holders.count(block) > 1 for block in set(holders))
        assert self.cache.num_sequences == len(self.held)
        if self.cache.index is None:
            assert counts.evictable_blocks == counts.shared_blocks == 0


KvCacheMachine.TestCase.settings = settings(stateful_step_count=30)
TestKvCacheTraces = KvCacheMachine.TestCase
