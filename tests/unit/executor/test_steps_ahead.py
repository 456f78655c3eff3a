"""Steps that are begun before the one ahead of them is finished."""

from __future__ import annotations

import numpy as np
import pytest

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import Opening
from executor_service.engine.session import Session
from executor_service.engine.step_in_flight import StepInFlight
from executor_service.engine.step_request import (
    Limits,
    Outcome,
    RowOutcome,
    StepAnswer,
    StepResults,
)
from executor_service.errors import InvalidStepError, StepOutOfOrderError
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.prefix_index import PrefixIndex
from isobatch_kernels.step import Stat
from tests.support.fake_backend import POISON_TOKEN, FakeBackend, toy_logits
from tests.support.steps import Row, Want, step_request

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, vocab_size=64, context_length=100, max_top_k=8
)
DRAW = Want(Stat.QUANTILE | Stat.NORMALIZER, quantile=0.7)


class _World:
    """A session over a toy backend, with prefixes shared."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.backend = FakeBackend(num_blocks)
        index = PrefixIndex(Chains(CacheIdentity("X1", "f16", "", "", 16)))
        cache = KvCacheManager(num_blocks, 16, self.backend.zero_blocks, index)
        self.session = Session("toy", ModelRunner(("embed", "qkv"), self.backend), cache, LIMITS)
        self.ticket = self.session.start(10)
        self.step_id = 0

    def open(self, *sequence_ids: int, token_ids: tuple[int, ...] = ()) -> list[int]:
        ids = np.array(token_ids, np.int32)
        return self.session.open(
            self.ticket, [Opening(e, 0, "", "", ids, 99) for e in sequence_ids]
        )

    def begin(self, *rows: Row, released: tuple[int, ...] = ()) -> StepInFlight:
        self.step_id += 1
        return self.repeat(self.step_id, *rows, released=released)

    def repeat(self, step_id: int, *rows: Row, released: tuple[int, ...] = ()) -> StepInFlight:
        request = step_request(step_id, rows, released)
        return self.session.begin_step(self.ticket, request, 0)

    def finish(self, step: StepInFlight) -> StepAnswer:
        answer = step.finish()
        self.session.check_integrity()
        return answer


def _argmax(*tokens: int) -> int:
    return int(np.argmax(toy_logits(tokens, LIMITS.vocab_size)))


def _text(first: int) -> list[int]:
    """40 tokens of the toy model."""
    text = [first, 6]
    while len(text) < 40:
        text.append(_argmax(*text))
    return text


def _results(answer: StepAnswer) -> StepResults:
    assert answer.results is not None
    return answer.results


def _ahead(sequence_id: int, start: int, step_id: int, index: int, want: Want | None = None) -> Row:
    return Row(sequence_id, (0,), start, want=want or Want(), output_of=(step_id, index))


def test_rows_ahead_get_the_tokens_that_the_step_before_them_chooses() -> None:
    """Drawn or the best, each from its own place; the order of rows does not matter."""
    plain = _World()
    plain.open(1, 2)
    results = _results(plain.finish(plain.begin(Row(1, (5, 6)), Row(2, (9,), want=DRAW))))
    first, second = int(results.argmax_ids[0]), int(results.quantile_ids[1])
    expected = _results(
        plain.finish(plain.begin(Row(2, (second,), 1, want=DRAW), Row(1, (first,), 2)))
    )

    world = _World()
    world.open(1, 2)
    before = world.begin(Row(1, (5, 6)), Row(2, (9,), want=DRAW))
    ahead = world.begin(_ahead(2, 1, 1, 1, DRAW), _ahead(1, 2, 1, 0))
    assert world.backend.num_runs == 0
    assert _results(world.finish(before)).argmax_ids.tolist() == results.argmax_ids.tolist()
    found = _results(world.finish(ahead))
    assert found.argmax_ids.tolist() == expected.argmax_ids.tolist()
    assert found.quantile_ids.tolist() == expected.quantile_ids.tolist()


def test_steps_ahead_follow_each_other_and_share_what_they_have_written() -> None:
    world = _World()
    world.open(1)
    whole = next(text for text in map(_text, range(64)) if POISON_TOKEN not in text)
    known = whole[:2]
    step = world.begin(Row(1, tuple(known)))
    for start in range(2, 40):
        ahead = world.begin(_ahead(1, start, world.step_id, 0))
        assert _results(world.finish(step)).argmax_ids.tolist() == [_argmax(*known)]
        known.append(_argmax(*known))
        step = ahead
    world.finish(step)
    # The last step has computed the token at position 39.
    assert known == whole
    assert world.open(2, token_ids=(*known, 1)) == [32]


def test_a_row_whose_source_is_not_finite_is_not_either_and_harms_nobody() -> None:
    world = _World()
    world.open(1, 2)
    before = world.begin(Row(1, (POISON_TOKEN,)), Row(2, (9,)))
    ahead = world.begin(_ahead(1, 1, 1, 0), _ahead(2, 1, 1, 1))
    bad, good = RowOutcome.NON_FINITE, RowOutcome.COMPUTED
    assert _results(world.finish(before)).row_outcomes.tolist() == [bad, good]
    results = _results(world.finish(ahead))
    assert results.row_outcomes.tolist() == [bad, good]
    assert results.argmax_ids[1] == _argmax(9, _argmax(9))
    # A token that comes from a row of another sequence taints as well.
    world.open(3)
    crossed = world.begin(Row(3, (7,)), _ahead(2, 2, 2, 0))
    assert _results(world.finish(crossed)).row_outcomes.tolist() == [good, bad]


def test_without_blocks_the_step_ahead_does_not_run_either() -> None:
    """Its releases are applied, and the next step may be a literal one."""
    world = _World(num_blocks=2)
    world.open(1, 2)
    world.finish(world.begin(Row(1, tuple(range(16, 32))), Row(2, (9,))))
    before = world.begin(Row(1, (5,), 16), Row(2, (8,), 1))
    ahead = world.begin(_ahead(1, 17, 2, 0), released=(2,))
    assert world.finish(before).outcome is Outcome.NO_CAPACITY
    assert world.finish(ahead).outcome is Outcome.SOURCE_NOT_COMPUTED
    assert world.session.num_sequences == 1
    assert world.backend.num_runs == 1
    again = world.begin(Row(1, (5,), 16))
    assert _results(world.finish(again)).argmax_ids.tolist() == [_argmax(*range(16, 32), 5)]


def test_what_a_step_ahead_gives_back_is_still_there_for_the_one_before() -> None:
    """The released sequence has a row there, and its block goes to the row that grows."""
    world = _World(num_blocks=2)
    world.open(1, 2)
    world.finish(world.begin(Row(1, tuple(range(16, 31))), Row(2, (9,))))
    before = world.begin(Row(1, (5,), 15), Row(2, (8,), 1))
    ahead = world.begin(_ahead(1, 16, 2, 0), released=(2,))
    known = [*range(16, 31), 5]
    assert _results(world.finish(before)).argmax_ids.tolist() == [_argmax(*known), _argmax(9, 8)]
    assert _results(world.finish(ahead)).argmax_ids.tolist() == [_argmax(*known, _argmax(*known))]


def test_what_comes_behind_a_step_that_waits_to_give_back_waits_too() -> None:
    """The step that waits is begun first, and the one behind it gets the token that it chooses."""
    world = _World()
    world.open(1, 2)
    first = world.begin(Row(1, (5, 6)), Row(2, (9,)))
    waiting = world.begin(_ahead(1, 2, 1, 0), released=(2,))
    world.finish(first)
    behind = world.begin(_ahead(1, 3, 2, 0))
    token = _argmax(5, 6)
    assert _results(world.finish(waiting)).argmax_ids.tolist() == [_argmax(5, 6, token)]
    third = _argmax(5, 6, token)
    assert _results(world.finish(behind)).argmax_ids.tolist() == [_argmax(5, 6, token, third)]


def test_a_failure_takes_both_steps_back_and_both_may_come_again() -> None:
    world = _World()
    world.open(1)
    rows = Row(1, (5, 6)), _ahead(1, 2, 1, 0)
    steps = [world.begin(row) for row in rows]
    world.backend.fail_next = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        steps[0].finish()
    with pytest.raises(StepOutOfOrderError, match="before 2 must be computed, got a failed one"):
        steps[1].finish()
    again = [world.repeat(step_id, row) for step_id, row in enumerate(rows, 1)]
    assert _results(world.finish(again[0])).argmax_ids.tolist() == [_argmax(5, 6)]
    expected = _argmax(5, 6, _argmax(5, 6))
    assert _results(world.finish(again[1])).argmax_ids.tolist() == [expected]


def test_a_failure_of_the_second_step_leaves_the_first() -> None:
    world = _World()
    world.open(1)
    before, ahead = world.begin(Row(1, (5, 6))), world.begin(_ahead(1, 2, 1, 0))
    world.finish(before)
    world.backend.fail_next = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        ahead.finish()
    again = world.finish(world.repeat(2, _ahead(1, 2, 1, 0)))
    assert _results(again).argmax_ids.tolist() == [_argmax(5, 6, _argmax(5, 6))]


def test_two_answers_are_kept_for_whoever_has_seen_neither() -> None:
    world = _World()
    world.open(1)
    rows = Row(1, (5, 6)), _ahead(1, 2, 1, 0)
    answers = [world.finish(step) for step in [world.begin(row) for row in rows]]
    world.ticket = world.session.start(10)
    repeated = [world.repeat(step_id, row) for step_id, row in enumerate(rows, 1)]
    assert [step.finish() for step in repeated] == answers
    assert world.backend.num_runs == 2
    # The next one goes on from the second.
    world.step_id = 2
    world.finish(world.begin(_ahead(1, 3, 2, 0)))


@pytest.mark.parametrize("source", [(1, 1), (1, -1), (2, 0), (0, 0)])
def test_a_token_that_the_step_in_flight_does_not_choose_is_refused(
    source: tuple[int, int],
) -> None:
    world = _World()
    world.open(1)
    before = world.begin(Row(1, (5, 6)))
    with pytest.raises(InvalidStepError, match="row_source_steps must name a token"):
        world.begin(Row(1, (0,), 2, output_of=source))
    # Nothing has changed.
    ahead = world.repeat(2, _ahead(1, 2, 1, 0))
    world.finish(before)
    assert _results(world.finish(ahead)).argmax_ids.tolist() == [_argmax(5, 6, _argmax(5, 6))]


def test_a_position_without_a_choice_is_refused_as_source() -> None:
    world = _World()
    world.open(1)
    world.begin(Row(1, (5, 6), want=Want(Stat.NORMALIZER)))
    with pytest.raises(InvalidStepError, match="row_source_steps must name a token"):
        world.begin(_ahead(1, 2, 1, 0))


def test_the_time_of_a_step_that_waited_counts_from_the_end_of_the_one_before() -> None:
    world = _World()
    world.open(1)
    before, ahead = world.begin(Row(1, (5, 6))), world.begin(_ahead(1, 2, 1, 0))
    first, second = world.finish(before), world.finish(ahead)
    assert first.since_ns == 0
    assert second.since_ns > 0
    assert second.queue_ns >= 0
