"""Provenance as the session tells it: steps, rows, writers, handles, digests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import Opening
from executor_service.engine.provenance_report import opening_handle
from executor_service.engine.session import Session
from executor_service.engine.step_request import Limits, StepAnswer
from executor_service.errors import RecordNotKeptError
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.prefix_index import PrefixIndex
from tests.support.fake_backend import FakeBackend
from tests.support.steps import Row, step_request

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, vocab_size=64, context_length=100, max_top_k=8
)


class _World:
    """A session over a toy backend, with its ticket taken."""

    def __init__(self) -> None:
        backend = FakeBackend(8)
        index = PrefixIndex(Chains(CacheIdentity("X1", "f16", "w", "c", 16)))
        cache = KvCacheManager(8, 16, backend.zero_blocks, index)
        self.session = Session("toy", ModelRunner(("embed",), backend), cache, LIMITS)
        self.ticket = self.session.start(10)
        self.step_id = 0

    def open(self, *sequence_ids: int, tokens: tuple[int, ...] = ()) -> list[int]:
        known = np.array(tokens, np.int32)
        openings = [Opening(each, 0, "", "", known, len(tokens)) for each in sequence_ids]
        return self.session.open(self.ticket, openings)

    def step(self, *rows: Row) -> StepAnswer:
        self.step_id += 1
        return self.session.step(self.ticket, step_request(self.step_id, rows), 7)


def test_provenance_names_steps_rows_and_writers() -> None:
    world = _World()
    world.open(1, 2)
    world.step(Row(1, tuple(range(20, 37))))
    world.step(Row(1, (5,), 17), Row(2, (6, 7, 8)))
    report = world.session.provenance(1, 0, include_digests=True)
    assert [step.record.step_id for step in report.steps] == [1, 2]
    assert [step.record.row_num_tokens.tolist() for step in report.steps] == [[17], [1, 3]]
    mine, neighbour = report.steps[1].sequence_hashes.tolist()
    assert report.steps[0].sequence_hashes.tolist() == [mine]
    assert mine not in (1, neighbour)
    assert [block.position_steps for block in report.blocks] == [(0,) * 16, (0, 1)]
    assert [block.writer_hash for block in report.blocks] == [mine, mine]
    other = world.session.provenance(2, 0, include_digests=True)
    assert other.blocks[0].writer_hash == neighbour
    # The same token at another position and another token are other bytes in the toy's cache.
    assert len({each for block in report.blocks for each in block.position_digests}) == 18
    assert world.session.provenance(1, 0).blocks[0].position_digests == ()


def test_provenance_of_what_is_gone_is_an_error() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, (5,)))
    with pytest.raises(RecordNotKeptError, match="got sequence 1, generation 3"):
        world.session.provenance(1, 3)
    world.session.release(world.ticket, [1])
    with pytest.raises(RecordNotKeptError, match="got sequence 1, generation 0"):
        world.session.provenance(1, 0)
    for handle in (0, 3, 4):
        with pytest.raises(RecordNotKeptError):
            world.session.provenance_of(handle)


def test_a_step_gives_a_handle_where_it_is_asked_for() -> None:
    world = _World()
    world.open(1)
    assert world.step(Row(1, (5,))).provenance_handle == 0
    world.step_id += 1
    request = replace(step_request(2, [Row(1, (6, 7), 1)]), record_provenance=True)
    handle = world.session.step(world.ticket, request, 0).provenance_handle
    (step,) = world.session.provenance_of(handle).steps
    assert (step.record.step_id, step.record.num_tokens, step.record.scheduler_epoch) == (2, 2, 10)


def test_a_shared_prefix_keeps_the_record_of_who_wrote_it() -> None:
    prompt = tuple(range(20, 60))
    world = _World()
    world.open(1)
    world.step(Row(1, prompt[:20]))
    world.step(Row(1, prompt[20:], 20))
    writer = world.session.provenance(1, 0).blocks[0].writer_hash
    world.session.release(world.ticket, [1])
    assert world.open(2, tokens=(*prompt, 7, 8)) == [32]
    handle = opening_handle(2, 32)
    before = world.session.provenance_of(handle)
    assert [block.writer_hash for block in before.blocks] == [writer, writer]
    assert [step.record.step_id for step in before.steps] == [1, 2]
    assert before.blocks[1].position_steps == (0,) * 4 + (1,) * 12
    world.step(Row(2, (*prompt[32:], 7, 8), 32))
    whole = world.session.provenance(2, 0)
    mine = whole.blocks[2].writer_hash
    assert [block.writer_hash for block in whole.blocks] == [writer, writer, mine]
    assert mine != writer
    # The handle names the cached positions alone, whatever the sequence computed since.
    assert len(world.session.provenance_of(handle).blocks) == 2


def test_a_block_that_is_taken_over_forgets_its_writer() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, (21,) * 64))
    world.session.release(world.ticket, [1])
    world.open(2)
    world.step(Row(2, (5,) * 60))
    # More than the free blocks: some of the first one's are taken.
    world.step(Row(2, (5,) * 40, 60))
    report = world.session.provenance(2, 0)
    (mine,) = {block.writer_hash for block in report.blocks}
    assert {each for step in report.steps for each in step.sequence_hashes.tolist()} == {mine}
    assert [step.record.step_id for step in report.steps] == [2, 3]
