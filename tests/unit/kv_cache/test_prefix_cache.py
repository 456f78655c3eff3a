"""Shared prefixes: what is found, what never is, what stays, and what goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from executor_service.kv_cache.chain import CacheIdentity, ChainNode, Chains, chain_digest
from executor_service.kv_cache.manager import KvCacheManager, KvOccupancy
from executor_service.kv_cache.prefix_index import PrefixIndex

IDENTITY = CacheIdentity("X1", "f16", "weights", "config", 16)
A, B, C = ([letter] * 16 for letter in (1, 2, 3))


def tokens(ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


class Cache(KvCacheManager):
    """A manager whose sequences write known tokens."""

    def __init__(
        self, num_blocks: int = 8, digest: Callable[[bytes, bytes], bytes] = chain_digest
    ) -> None:
        index = PrefixIndex(Chains(IDENTITY, digest))
        super().__init__(num_blocks, 16, lambda _: None, index)
        self.prefixes = index

    def write(self, sequence_id: int, ids: Sequence[int], start: int = 0) -> int:
        end = start + len(ids)
        assert self.grow({sequence_id: end})
        return self.written(sequence_id, start, tokens(ids).tobytes(), end)

    def hit(self, sequence_id: int, ids: Sequence[int], salt: str = "", most: int = 10**6) -> int:
        return self.open(sequence_id, salt, tokens(ids), most)

    def run(self, sequence_id: int, ids: Sequence[int], salt: str = "") -> list[int]:
        self.open(sequence_id, salt)
        self.write(sequence_id, ids)
        return list(self.blocks_of(sequence_id))


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_full_block_is_found_while_its_writer_runs(cache: Cache) -> None:
    first = cache.run(1, A + B + [7])
    assert cache.hit(2, A + B + C) == 32
    assert list(cache.blocks_of(2)) == first[:2]
    assert cache.occupancy() == KvOccupancy(8, 5, 0, 2)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("length", "most", "cached"),
    [(33, 99, 32), (32, 99, 16), (17, 99, 16), (16, 99, 0), (1, 99, 0), (0, 99, 0),
     (48, 32, 32), (48, 31, 16), (48, 15, 0), (48, 0, 0)],
)  # fmt: skip
def test_a_hit_is_whole_blocks_and_leaves_a_token(
    cache: Cache, length: int, most: int, cached: int
) -> None:
    cache.run(1, A + B + C)
    assert cache.hit(2, (A + B + C)[:length], most=most) == cached


def test_a_block_depends_on_all_tokens_before(cache: Cache) -> None:
    cache.run(1, A + B)
    assert cache.hit(2, B + A + [1]) == 0
    assert cache.hit(3, A + C + [1]) == 16
    assert cache.hit(4, [*B, 1]) == 0


def test_a_salt_keeps_tenants_apart(cache: Cache) -> None:
    cache.run(1, A + B, salt="a")
    for number, salt in enumerate(("", "b", "aa", "A"), 2):
        assert cache.hit(number, A + B + C, salt) == 0
    assert cache.hit(9, A + B + C, "a") == 32


def test_another_tenants_search_does_not_change_what_goes_first() -> None:
    cache = Cache(2)
    for sequence_id, block in ((1, A), (2, B)):
        cache.run(sequence_id, block, salt="mine")
        cache.release([sequence_id])
    order = cache.prefixes.evictable()
    cache.hit(3, [*A, 1], "other")
    cache.release([3])
    assert cache.prefixes.evictable() == order


def test_every_part_of_the_identity_counts() -> None:
    others = [
        replace(IDENTITY, numeric_class="other"),
        replace(IDENTITY, kv_class="other"),
        replace(IDENTITY, weights_digest="other"),
        replace(IDENTITY, config_digest="other"),
        replace(IDENTITY, block_size=32),
    ]
    moved = CacheIdentity("X1f16", "", "weights", "config", 16)
    roots = [Chains(each).root("s") for each in (IDENTITY, *others, moved)]
    digests = {root.digest for root in roots if root is not None}
    assert len(digests) == len(roots)


def test_blocks_stay_after_their_writer(cache: Cache) -> None:
    blocks = cache.run(1, A + B + [9])
    cache.release([1])
    assert cache.occupancy() == KvOccupancy(8, 6, 2, 0)
    assert cache.hit(2, A + B + C) == 32
    assert list(cache.blocks_of(2)) == blocks[:2]
    assert cache.occupancy() == KvOccupancy(8, 6, 0, 0)
    cache.check_integrity()
    cache.release_all()
    assert cache.occupancy() == KvOccupancy(8, 6, 2, 0)


def test_a_second_writer_keeps_its_own_copy_and_inherits_the_place(cache: Cache) -> None:
    first, second = cache.run(1, A + B), cache.run(2, A + C)
    assert not set(first) & set(second)
    assert len(cache.prefixes) == 3  # A of the first, B, C
    cache.release([1])
    assert cache.hit(3, [*A, 1]) == 16
    assert list(cache.blocks_of(3)) == first[:1]
    cache.check_integrity()


def test_a_copy_takes_the_place_of_a_block_that_has_gone() -> None:
    cache = Cache(5)
    cache.run(1, A)
    second = cache.run(2, A + B)
    cache.release([1])
    cache.open(3)
    assert cache.grow({3: 48})  # takes the first copy's place
    cache.release([2, 3])
    cache.check_integrity()
    assert cache.hit(4, A + B + [1]) == 32
    assert list(cache.blocks_of(4)) == second


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    cache = Cache(4)
    cache.run(1, A + B + C)
    cache.release([1])
    cache.open(2)
    assert cache.grow({2: 32})  # one is free, one has to go
    assert cache.hit(3, A + B + C + [1]) == 32
    assert cache.prefixes.counts.evictions == 1
    cache.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(3)
    for sequence_id, block in ((1, A), (2, B), (3, C)):
        cache.run(sequence_id, block)
        cache.release([sequence_id])
    cache.hit(4, [*A, 1])
    cache.release([4])
    cache.open(5)
    assert cache.grow({5: 16})
    assert [cache.hit(6 + n, [*block, 1]) for n, block in enumerate((A, B, C))] == [16, 0, 16]


def test_using_an_own_copy_keeps_the_first_one_young() -> None:
    cache = Cache(4)
    cache.run(1, A)
    cache.run(2, A)
    cache.run(3, B)
    for sequence_id in (1, 3, 2):
        cache.release([sequence_id])
    cache.open(4)
    assert cache.grow({4: 48})
    assert [cache.hit(5, [*A, 1]), cache.hit(6, [*B, 1])] == [16, 0]


def test_held_blocks_are_never_taken() -> None:
    cache = Cache(3)
    cache.run(1, A)
    cache.release([1])
    cache.hit(2, [*A, 1])
    cache.open(3)
    assert not cache.grow({3: 48})
    assert cache.grow({3: 32})
    cache.check_integrity()


def test_growth_counts_what_can_be_evicted() -> None:
    cache = Cache(3)
    cache.run(1, A + B)
    cache.release([1])
    cache.open(2)
    assert cache.grow({2: 48})
    assert cache.occupancy() == KvOccupancy(3, 0, 0, 0)
    cache.check_integrity()


def test_unconfirmed_tokens_are_not_shared(cache: Cache) -> None:
    cache.open(1)
    cache.grow({1: 40})
    assert cache.written(1, 0, tokens(A[:10]).tobytes(), 10) == 0
    # The last known token and a draft of eight: only the first is sure.
    assert cache.written(1, 10, tokens([1, *[5] * 8]).tobytes(), 11) == 0
    assert len(cache.prefixes) == 0
    # Two of the draft were right: positions up to 13 are.
    assert cache.written(1, 13, tokens([6, 6, 6, 9]).tobytes(), 14) == 0
    assert cache.written(1, 17, tokens([9]).tobytes(), 18) == 16
    assert cache.hit(2, [*A[:11], 5, 5, 6, 6, 6, 9]) == 16
    assert cache.hit(3, A[:11] + [5] * 8) == 0


def test_a_sequence_that_is_not_finite_shares_nothing_more(cache: Cache) -> None:
    cache.run(1, A)
    cache.stop_sharing(1)
    assert cache.write(1, B, 16) == 16
    cache.release([1])
    assert cache.hit(2, A + B + [1]) == 16
    assert cache.occupancy().evictable_blocks == 0
    cache.check_integrity()


@pytest.mark.parametrize("width", [0, 1])
def test_digests_that_collide_never_lead_to_another_state(width: int) -> None:
    """With digests of one value or of 256, only equal chains are found."""
    cache = Cache(40, lambda parent, block: chain_digest(parent, block)[:width])
    generator = np.random.default_rng(width)
    contents: dict[int, list[int]] = {}
    for sequence_id in range(300):
        ids = [*np.repeat(generator.integers(0, 6, 4), 16).tolist(), 1]
        cached = cache.hit(sequence_id, ids, str(sequence_id % 2))
        found = cache.blocks_of(sequence_id)[: cached // 16]
        salt = sequence_id % 2
        for index, block in enumerate(found):
            assert contents[block] == [salt, *ids[: 16 * (index + 1)]]
        cache.write(sequence_id, ids[cached:], cached)
        for index, block in enumerate(cache.blocks_of(sequence_id)):
            contents[block] = [salt, *ids[: 16 * (index + 1)]]
        if sequence_id % 3 == 2:
            cache.release(range(sequence_id - 2, sequence_id + 1))
        cache.check_integrity()
    assert cache.prefixes.counts.lookups_hit > 0 or width == 0


def test_long_chains_end_quietly() -> None:
    chains = Chains(IDENTITY)
    node: ChainNode | None = chains.root("")
    for number in range(30_000):
        assert node is not None
        node = chains.child(node, number.to_bytes(64, "little"))
    del node


def test_counts_are_of_what_was_looked_for(cache: Cache) -> None:
    cache.run(1, A + B)
    cache.hit(2, A + C + [1])
    cache.hit(3, [*C, 1])
    counts = cache.prefixes.counts
    assert (counts.lookups_hit, counts.lookups_missed) == (1, 1)
    assert (counts.tokens_hit, counts.tokens_missed) == (16, 16 + 16)
    assert counts.indexed == 2


class BrokenTier:
    """Has every block, and fails to read it or to put it where it belongs."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads

    def begin(self, *, is_alone: bool) -> bool:
        return True

    def load(self, node: ChainNode) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        if not self.reads:
            raise MemoryError
        return np.zeros(1, np.uint16)

    def put(self, block: int, bits: object) -> None:
        raise MemoryError

    def keep(self, node: ChainNode, block: int) -> None:
        pass

    def note_step(self, num_blocks: float, seconds: float) -> None:
        pass


@pytest.mark.parametrize("reads", [False, True])
def test_an_opening_that_fails_holds_nothing(cache: Cache, reads: bool) -> None:
    cache.run(1, A)
    cache.release([1])
    before = cache.occupancy()
    cache._tier = BrokenTier(reads=reads)
    for _ in range(3):
        with pytest.raises(MemoryError):
            cache.hit(2, A + B + [1])
    assert cache.occupancy() == before
    cache.check_integrity()
    cache._tier = None
    assert cache.hit(2, A + B + [1]) == 16
