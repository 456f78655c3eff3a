"""Random lives of sequences: after every action the cache is whole and agrees with a model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor_service.kv_cache.block_pool import BlockId
from executor_service.kv_cache.manager import KvCacheManager

NUM_BLOCKS = 12
SEQUENCES = st.integers(0, 5)


class KvCacheMachine(RuleBasedStateMachine):
    """The model: which blocks each open sequence has, and who else has them."""

    def __init__(self) -> None:
        super().__init__()
        self.dirty = set(range(NUM_BLOCKS))  # blocks that hold somebody's old keys and values
        self.cache = KvCacheManager(NUM_BLOCKS, 16, self._zero)
        self.held: dict[int, list[int]] = {}

    def _zero(self, blocks: npt.NDArray[np.int32]) -> None:
        self.dirty -= set(blocks.tolist())

    def _table(self, sequence_id: int) -> list[int]:
        row = self.cache.block_tables([sequence_id])[0].tolist()
        return [block for block in row if block >= 0]

    @rule(sequence_id=SEQUENCES, donor=SEQUENCES, count=st.integers(0, 4))
    def open(self, sequence_id: int, donor: int, count: int) -> None:
        if sequence_id in self.held:
            return
        prefix = self.held.get(donor, [])[:count]
        cached = self.cache.open(sequence_id, [BlockId(block) for block in prefix])
        assert cached == 16 * len(prefix)
        self.held[sequence_id] = list(prefix)

    @rule(lengths=st.dictionaries(SEQUENCES, st.integers(1, 100), min_size=1))
    def grow(self, lengths: dict[int, int]) -> None:
        wanted = {key: length for key, length in lengths.items() if key in self.held}
        before = {key: self._table(key) for key in self.held}
        missing = sum(
            max(0, -(-length // 16) - len(self.held[key])) for key, length in wanted.items()
        )
        free = self.cache.occupancy().free_blocks
        assert self.cache.grow(wanted) == (missing <= free)
        for key, table in before.items():
            now = self._table(key)
            assert now[: len(table)] == table
            if missing > free or key not in wanted:
                assert now == table
            else:
                assert 16 * len(now) >= wanted[key]
            fresh = now[len(table) :]
            assert not self.dirty & set(fresh)
            self.dirty |= set(fresh)  # rows are written to them
            self.held[key] = now

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
        holders = [block for blocks in self.held.values() for block in blocks]
        counts = self.cache.occupancy()
        assert counts.total_blocks - counts.free_blocks == len(set(holders))
        assert counts.shared_blocks == sum(holders.count(block) > 1 for block in set(holders))
        assert self.cache.num_sequences == len(self.held)


KvCacheMachine.TestCase.settings = settings(stateful_step_count=30)
TestKvCacheTraces = KvCacheMachine.TestCase
