"""The session over a prefix index: openings that hit, rows that are taken back, poisoned rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from executor_service.engine.confirmed import confirmed_ends
from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import Opening
from executor_service.engine.session import Session
from executor_service.engine.step_request import Limits, StepAnswer
from executor_service.errors import InvalidStepError
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.prefix_index import PrefixIndex
from tests.support.fake_backend import POISON_TOKEN, FakeBackend, toy_logits
from tests.support.steps import Row, Want, all_wanted, step_request

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, vocab_size=64, context_length=100, max_top_k=8
)
TEXT = tuple(range(20, 60))


class _World:
    """A session over a toy backend and a prefix index."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.backend = FakeBackend(num_blocks)
        index = PrefixIndex(Chains(CacheIdentity("X1", "f16", "w", "c", 16)))
        cache = KvCacheManager(num_blocks, 16, self.backend.zero_blocks, index)
        self.session = Session("toy", ModelRunner((), self.backend), cache, LIMITS)
        self.restart(1)

    def restart(self, epoch: int) -> None:
        self.ticket = self.session.start(epoch)
        self.step_id = 0

    def open(
        self, sequence_id: int, tokens: Sequence[int] = (), generation: int = 0, salt: str = ""
    ) -> int:
        ids = np.array(tokens, np.int32)
        opening = Opening(sequence_id, generation, "", salt, ids, len(tokens))
        return self.session.open(self.ticket, [opening])[0]

    def step(self, *rows: Row, verify: bool = False) -> StepAnswer:
        request = step_request(self.step_id + 1, rows)
        answer = self.session.step(self.ticket, all_wanted(request) if verify else request, 7)
        self.step_id += 1
        self.session.check_integrity()
        return answer


def _chosen(answer: StepAnswer) -> list[int]:
    assert answer.results is not None
    return [int(token) for token in answer.results.argmax_ids]


def _argmax(tokens: Sequence[int]) -> int:
    return int(np.argmax(toy_logits(tokens, LIMITS.vocab_size)))


def test_a_hit_gives_what_a_whole_prefill_gives() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT))
    assert world.open(2, TEXT) == 32
    assert _chosen(world.step(Row(2, TEXT[32:], 32))) == [_argmax(TEXT)]
    assert world.open(3, TEXT[:32]) == 16
    assert _chosen(world.step(Row(3, TEXT[16:32], 16))) == [_argmax(TEXT[:32])]


def test_opening_again_answers_the_same_and_pins_nothing_more() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT[:20]))
    assert world.open(2, TEXT) == 16
    world.step(Row(1, TEXT[20:], 20))
    counts = world.session.occupancy()
    assert world.open(2, TEXT) == 16  # another 16 are there by now
    assert world.session.occupancy() == counts
    # A new generation lets go of the old one's blocks and looks again.
    assert world.open(2, TEXT, generation=1) == 32
    world.session.release(world.ticket, [1, 2])
    assert world.session.occupancy().shared_blocks == 0
    assert world.session.occupancy().evictable_blocks == 2


def test_a_new_scheduler_finds_what_the_old_one_left() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT))
    world.restart(2)
    assert world.session.num_sequences == 0
    assert world.open(1, TEXT) == 32
    assert _chosen(world.step(Row(1, TEXT[32:], 32))) == [_argmax(TEXT)]


def test_what_a_request_generated_is_cached_for_its_next_turn() -> None:
    world = _World()
    world.open(1)
    answer = world.step(Row(1, TEXT[:20]))
    known = list(TEXT[:20])
    for _ in range(20):
        known += _chosen(answer)
        answer = world.step(Row(1, (known[-1],), len(known) - 1))
    world.session.release(world.ticket, [1])
    assert world.open(2, [*known, 7, 8]) == 32
    assert _chosen(world.step(Row(2, (*known[32:], 7, 8), 32))) == [_argmax([*known, 7, 8])]


def test_a_refused_draft_is_never_served() -> None:
    """A draft fills a block and is taken back: whoever has the draft as its text finds nothing."""
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT[:12]))
    draft = (1, 2, 3, 4, 5, 6)
    world.step(Row(1, (TEXT[12], *draft), 12), verify=True)
    assert world.open(2, [*TEXT[:13], *draft, 9]) == 0
    assert _chosen(world.step(Row(1, TEXT[13:20], 13))) == [_argmax(TEXT[:20])]
    assert world.open(3, [*TEXT[:13], *draft, 9]) == 0
    assert world.open(4, TEXT) == 16
    assert _chosen(world.step(Row(4, TEXT[16:], 16))) == [_argmax(TEXT)]


def test_a_taken_draft_is_cached_once_the_next_row_goes_on_behind_it() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT[:12]))
    world.step(Row(1, TEXT[12:20], 12), verify=True)
    assert world.open(2, TEXT) == 0
    world.step(Row(1, TEXT[18:19], 18))
    assert world.open(3, TEXT) == 16


@pytest.mark.parametrize("start", [0, 15])
def test_rows_do_not_go_back_into_shared_blocks(start: int) -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT[:20]))
    with pytest.raises(InvalidStepError, match=r"must be in 16\.\.20"):
        world.step(Row(1, (5,), start))
    assert _chosen(world.step(Row(1, (5,), 16))) == [_argmax([*TEXT[:16], 5])]


def test_the_state_of_a_row_that_is_not_finite_is_never_shared() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, TEXT[:10]))
    bad = [*TEXT[:10], POISON_TOKEN, *TEXT[:9]]
    world.step(Row(1, tuple(bad[10:]), 10))
    world.step(Row(1, TEXT[:20], 20))
    assert world.open(2, [*bad, *TEXT[:20]]) == 0
    world.session.release(world.ticket, [1, 2])
    assert world.session.occupancy().free_blocks == 8


def test_a_salt_hides_a_tenants_state() -> None:
    world = _World()
    world.open(1, salt="one")
    world.step(Row(1, TEXT))
    assert [world.open(2, TEXT), world.open(3, TEXT, salt="two")] == [0, 0]
    assert world.open(4, TEXT, salt="one") == 32


@pytest.mark.parametrize(
    ("lengths", "wanted", "confirmed"),
    [
        ((1, 1), [0, 1], [11, 21]),
        ((5, 4), [0, 1, 2, 3, 4], [11, 24]),  # a draft of four beside a piece of a prompt
        ((5, 4), [4, 8], [15, 24]),
        ((5, 4), [], [15, 24]),
        ((3, 1, 2), [1, 3, 4, 5], [12, 21, 31]),
    ],
)
def test_confirmed_ends(lengths: tuple[int, ...], wanted: list[int], confirmed: list[int]) -> None:
    rows = [
        Row(index, (5,) * length, 10 * (index + 1), want=Want() if not index else None)
        for index, length in enumerate(lengths)
    ]
    request = all_wanted(step_request(1, rows), wanted)
    ends = [row.start + len(row.tokens) for row in rows]
    assert confirmed_ends(request, ends) == confirmed
