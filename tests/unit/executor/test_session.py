"""The session: epochs, tickets, sequences, step ids, growth, sources, poisoned state."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import OPEN_SEQUENCES_PER_ROW, Opening
from executor_service.engine.session import Session
from executor_service.engine.step_request import Limits, Outcome, RowOutcome, StepAnswer
from executor_service.errors import (
    InvalidRequestError,
    InvalidStepError,
    LogitsNotKeptError,
    ModelNotFoundError,
    SequenceNotOpenError,
    SessionFencedError,
    StaleEpochError,
    StaleGenerationError,
    StepOutOfOrderError,
    TooManySequencesError,
)
from executor_service.kv_cache.manager import KvCacheManager
from isobatch_kernels.step import Stat
from tests.support.fake_backend import POISON_TOKEN, FakeBackend, toy_logits
from tests.support.steps import Row, Want, step_request

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, vocab_size=64, context_length=100, max_top_k=8
)
MAX_BYTES = 1 << 20


class _World:
    """A session over a toy backend, with its ticket taken."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.backend = FakeBackend(num_blocks)
        cache = KvCacheManager(num_blocks, 16, self.backend.zero_blocks)
        runner = ModelRunner(("embed", "layers.0.qkv"), self.backend)
        self.session = Session("toy", runner, cache, LIMITS)
        self.ticket = self.session.start(10)
        self.step_id = 0

    def open(self, *sequence_ids: int, generation: int = 0) -> list[int]:
        return self.session.open(self.ticket, [_opening(each, generation) for each in sequence_ids])

    def step(self, *rows: Row, released: tuple[int, ...] = ()) -> StepAnswer:
        self.step_id += 1
        answer = self.session.step(self.ticket, step_request(self.step_id, rows, released), 7)
        self.session.check_integrity()
        return answer


def _opening(sequence_id: int, generation: int = 0, model_id: str = "") -> Opening:
    return Opening(sequence_id, generation, model_id, "", np.zeros(0, np.int32), 0)


def _argmax(*tokens: int) -> int:
    return int(np.argmax(toy_logits(tokens, LIMITS.vocab_size)))


def _chosen(answer: StepAnswer) -> list[int]:
    assert answer.results is not None
    return [int(token) for token in answer.results.argmax_ids]


def test_rows_of_one_step_do_not_mix() -> None:
    world = _World()
    world.open(1, 2)
    assert _chosen(world.step(Row(1, (5, 6, 7)), Row(2, (9,)))) == [_argmax(5, 6, 7), _argmax(9)]
    assert _chosen(world.step(Row(2, (1, 2), 1), Row(1, (8,), 3))) == [
        _argmax(9, 1, 2),
        _argmax(5, 6, 7, 8),
    ]


def test_chunks_of_a_prompt_give_what_the_whole_gives() -> None:
    prompt = tuple(range(20, 60))
    world = _World()
    world.open(1)
    for start in range(0, 40, 7):
        answer = world.step(Row(1, prompt[start : start + 7], start))
    assert _chosen(answer) == [_argmax(*prompt)]


def test_a_lower_epoch_is_refused_and_a_higher_one_drops_everything() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, (5,)))
    with pytest.raises(StaleEpochError, match="must be at least 10, got 9"):
        world.session.start(9)
    ticket = world.session.start(11)
    assert world.session.num_sequences == 0
    assert world.session.occupancy().free_blocks == 8
    with pytest.raises(SessionFencedError):
        world.step(Row(1, (5,), 1))
    assert world.session.open(ticket, [_opening(1)]) == [0]
    answer = world.session.step(ticket, step_request(1, [Row(1, (6,))]), 0)
    assert _chosen(answer) == [_argmax(6)]


def test_the_same_epoch_takes_over_with_all_state() -> None:
    world = _World()
    world.open(1)
    answer = world.step(Row(1, (5, 6)))
    ticket = world.session.start(10)
    for call in (
        lambda: world.session.open(world.ticket, []),
        lambda: world.session.release(world.ticket, [1]),
        lambda: world.session.fetch_logits(world.ticket, 1, np.zeros(0, np.int32), MAX_BYTES),
    ):
        with pytest.raises(SessionFencedError):
            call()
    assert world.session.step(ticket, step_request(1, [Row(1, (5, 6))]), 0) is answer
    assert world.backend.num_runs == 1
    after = world.session.step(ticket, step_request(2, [Row(1, (7,), 2)]), 0)
    assert _chosen(after) == [_argmax(5, 6, 7)]


def test_an_epoch_must_be_set() -> None:
    with pytest.raises(InvalidRequestError, match="scheduler_epoch must be at least 1, got 0"):
        _World().session.start(0)


def test_step_ids_rise_by_one_and_the_last_two_are_answered_from_memory() -> None:
    world = _World()
    world.open(1)
    first = world.step(Row(1, (5,)))
    for step_id in (3, 7):
        with pytest.raises(StepOutOfOrderError, match=f"step_id must be 2, got {step_id}"):
            world.session.step(world.ticket, step_request(step_id, [Row(1, (6,), 1)]), 0)
    repeated = world.session.step(world.ticket, step_request(1, [Row(1, (5,))]), 0)
    assert repeated is first
    world.step(Row(1, (6,), 1))
    assert world.session.step(world.ticket, step_request(1, [Row(1, (5,))]), 0) is first
    world.step(Row(1, (7,), 2))
    with pytest.raises(StepOutOfOrderError, match="step_id must be 4, got 1"):
        world.session.step(world.ticket, step_request(1, [Row(1, (5,))]), 0)
    assert world.backend.num_runs == 3


def test_opening_is_idempotent_and_a_new_generation_starts_anew() -> None:
    world = _World()
    assert world.open(1) == [0]
    world.step(Row(1, (5, 6)))
    assert world.open(1) == [0]
    assert _chosen(world.step(Row(1, (7,), 2))) == [_argmax(5, 6, 7)]
    world.open(1, generation=1)
    assert world.session.occupancy().free_blocks == 8
    with pytest.raises(SequenceNotOpenError, match="generation 0, must be open, got generation 1"):
        world.step(Row(1, (8,), 3))
    world.step_id -= 1
    assert _chosen(world.step(Row(1, (9,), generation=1))) == [_argmax(9)]
    with pytest.raises(StaleGenerationError, match="must be at least 1, got 0"):
        world.open(2, 1)
    assert world.session.num_sequences == 1  # all are opened or none


def test_opening_is_bounded() -> None:
    world = _World()
    bound = OPEN_SEQUENCES_PER_ROW * LIMITS.max_num_seqs
    world.open(*range(bound))
    with pytest.raises(TooManySequencesError, match=f"at most {bound} sequences"):
        world.open(bound)
    assert world.open(0) == [0]  # known already


def test_another_model_is_not_found() -> None:
    world = _World()
    with pytest.raises(ModelNotFoundError, match="model_id must be toy, got other"):
        world.session.open(world.ticket, [_opening(1, model_id="other")])
    world.session.open(world.ticket, [_opening(1, model_id="toy")])
    request = step_request(1, [Row(1, (5,))], model_id="other")
    with pytest.raises(ModelNotFoundError):
        world.session.step(world.ticket, request, 0)


def test_releases_come_first() -> None:
    world = _World(num_blocks=2)
    world.open(1, 2)
    world.step(Row(1, tuple(range(20, 52))))
    answer = world.step(Row(2, tuple(range(30, 62))), released=(1, 99))
    assert answer.outcome is Outcome.COMPUTED
    assert _chosen(answer) == [_argmax(*range(30, 62))]
    with pytest.raises(SequenceNotOpenError, match="must be open, got a closed one"):
        world.step(Row(1, (5,), 32))


def test_a_full_pool_computes_nothing_but_applies_releases() -> None:
    world = _World(num_blocks=4)
    world.open(1, 2, 3)
    world.step(Row(1, tuple(range(20, 52))), Row(3, (5,)))
    answer = world.step(Row(1, (5,), 32), Row(2, tuple(range(20, 46))), released=(3,))
    assert answer.outcome is Outcome.NO_CAPACITY
    assert answer.results is None
    assert answer.occupancy.free_blocks == 2
    assert world.backend.num_runs == 1
    # Neither row moved on: both can be asked again from where they were.
    assert _chosen(world.step(Row(1, (5,), 32))) == [_argmax(*range(20, 52), 5)]
    assert _chosen(world.step(Row(2, (9,)))) == [_argmax(9)]


def test_a_gap_is_refused_and_going_back_is_not() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, (5, 6, 7)))
    with pytest.raises(InvalidStepError, match=r"of sequence 1 must be in 0\.\.3, got 4"):
        world.step(Row(1, (8,), 4))
    world.step_id -= 1
    assert _chosen(world.step(Row(1, (9,), 1))) == [_argmax(5, 9)]
    with pytest.raises(InvalidStepError, match=r"must be in 0\.\.2, got 3"):
        world.step(Row(1, (8,), 3))


def test_a_refused_step_changes_nothing() -> None:
    world = _World()
    world.open(1, 2)
    world.step(Row(1, (5,)))
    before = world.session.occupancy()
    request = step_request(2, [Row(1, (99,), 1)], released=(2,))
    with pytest.raises(InvalidStepError, match=r"token_ids must be in 0\.\.63, got 99"):
        world.session.step(world.ticket, request, 0)
    assert world.session.occupancy() == before
    assert world.session.num_sequences == 2
    assert _chosen(world.step(Row(1, (6,), 1))) == [_argmax(5, 6)]


def test_a_failing_backend_leaves_the_session_usable() -> None:
    world = _World()
    world.open(1)
    world.backend.fail_next = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        world.step(Row(1, (5,)))
    world.step_id -= 1
    assert _chosen(world.step(Row(1, (5,)))) == [_argmax(5)]


def test_a_step_without_rows_gives_sequences_back() -> None:
    world = _World()
    world.open(1)
    world.step(Row(1, (5,), want=Want(Stat.FULL_ROW)))
    answer = world.step(released=(1,))
    assert (answer.outcome, answer.results) == (Outcome.COMPUTED, None)
    assert answer.occupancy.free_blocks == 8
    assert world.backend.num_runs == 1
    with pytest.raises(LogitsNotKeptError, match="must be the last step, got 1"):
        world.session.fetch_logits(world.ticket, 1, np.zeros(1, np.int32), MAX_BYTES)


def test_outputs_of_the_last_step_are_tokens_of_the_next() -> None:
    world = _World()
    world.open(1, 2)
    draw = Want(Stat.ARGMAX | Stat.QUANTILE, quantile=0.9)
    first = world.step(Row(1, (5,)), Row(2, (6,), want=draw))
    assert first.results is not None
    drawn = int(first.results.quantile_ids[1])
    second = world.step(Row(2, (0,), 1, output_of=(1, 1)), Row(1, (0,), 1, output_of=(1, 0)))
    assert _chosen(second) == [_argmax(6, drawn), _argmax(5, _argmax(5))]


@pytest.mark.parametrize(
    ("source", "got"),
    [((1, 0), "step 1, wanted position 0"), ((2, 5), "position 5"), ((2, 1), "position 1")],
)
def test_sources_must_be_tokens_that_the_last_step_chose(source: tuple[int, int], got: str) -> None:
    world = _World()
    world.open(1, 2)
    world.step(Row(1, (5,)), Row(2, (6,)))
    world.step(Row(1, (5,), 1), Row(2, (6,), 1, want=Want(Stat.NORMALIZER)))
    with pytest.raises(InvalidStepError, match=f"last computed step chose, got .*{got}"):
        world.step(Row(1, (0,), 2, output_of=source))


def test_rows_that_are_not_finite_say_where_and_stay_so() -> None:
    world = _World()
    world.open(1, 2)
    answer = world.step(Row(1, (5, POISON_TOKEN, 6)), Row(2, (7,)))
    assert answer.results is not None
    assert answer.results.row_outcomes.tolist() == [RowOutcome.NON_FINITE, RowOutcome.COMPUTED]
    assert answer.results.non_finite_details == ("layers.0.qkv",)
    answer = world.step(Row(2, (8,), 1), Row(1, (0,), 3, output_of=(1, 0)))
    assert answer.results is not None
    assert answer.results.row_outcomes.tolist() == [RowOutcome.COMPUTED, RowOutcome.NON_FINITE]
    assert answer.results.non_finite_details == ("layers.0.qkv",)
    assert answer.results.argmax_ids[0] == _argmax(7, 8)


def test_a_token_of_a_row_that_is_not_finite_poisons_its_reader() -> None:
    world = _World()
    world.open(1, 2)
    world.step(Row(1, (POISON_TOKEN,)), Row(2, (7,)))
    answer = world.step(Row(2, (0,), 1, output_of=(1, 0)))
    assert answer.results is not None
    assert answer.results.row_outcomes.tolist() == [RowOutcome.NON_FINITE]
    assert answer.results.non_finite_details == ("the step that chose this row's token",)


def test_statistics_come_only_where_they_are_asked() -> None:
    world = _World()
    world.open(1, 2, 3)
    wants = (
        Want(Stat.TOP_K | Stat.NORMALIZER, top_k=3, inverse_temperature=0.5),
        Want(Stat.NAMED | Stat.DIGEST, named=(4, 60, 4), edits=((60, -2.5), (1, 3.0))),
    )
    answer = world.step(
        Row(1, (5,), want=wants[0]), Row(2, (6,), want=None), Row(3, (7, 8), want=wants[1])
    )
    results = answer.results
    assert results is not None
    first, second = toy_logits((5,), 64), toy_logits((7, 8), 64)
    second[60] -= np.float32(2.5)
    second[1] += np.float32(3.0)
    order = np.argsort(-first, kind="stable")[:3]
    assert results.argmax_ids.tolist() == [-1, -1]
    assert results.quantile_ids.tolist() == [-1, -1]
    assert results.max_logits.tolist() == [first.max(), second.max()]
    assert results.normalizers[1] == 0
    assert results.normalizers[0] > 0
    assert results.top_k_starts.tolist() == [0, 3, 3]
    assert results.top_k_ids.tolist() == order.tolist()
    assert results.top_k_logits.tolist() == first[order].tolist()
    assert results.named_logits.tolist() == second[[4, 60, 4]].tolist()
    digest = hashlib.blake2b(second.tobytes(), digest_size=16).digest()
    assert results.digests == bytes(16) + digest


def test_digests_are_left_out_when_nobody_asks() -> None:
    world = _World()
    world.open(1)
    results = world.step(Row(1, (5,))).results
    assert results is not None
    assert results.digests == b""


def test_full_rows_of_the_last_step_can_be_fetched() -> None:
    world = _World()
    world.open(1, 2, 3)
    world.step(
        Row(1, (5,), want=Want(Stat.FULL_ROW, edits=((3, 100.0),))),
        Row(2, (6,), want=Want(Stat.TOP_K, top_k=1)),
        Row(3, (7,)),
    )

    def fetch(step_id: int, indexes: list[int], max_bytes: int = MAX_BYTES) -> bytes:
        array = np.array(indexes, np.int32)
        return world.session.fetch_logits(world.ticket, step_id, array, max_bytes)

    edited = toy_logits((5,), 64)
    edited[3] += 100
    assert fetch(1, [1, 0]) == toy_logits((6,), 64).tobytes() + edited.tobytes()
    assert fetch(1, []) == b""
    with pytest.raises(LogitsNotKeptError, match=r"STATISTIC_FULL_ROW or .*got \[2\]"):
        fetch(1, [0, 2])
    with pytest.raises(InvalidRequestError, match="wanted_indexes must be below 3"):
        fetch(1, [3])
    with pytest.raises(InvalidRequestError, match="at most 255 bytes, got 256"):
        fetch(1, [0], 255)
    with pytest.raises(LogitsNotKeptError, match="must be the last step, got 2"):
        fetch(2, [0])
    world.step(Row(1, (8,), 1))
    with pytest.raises(LogitsNotKeptError, match="must be the last step, got 1"):
        fetch(1, [0])


def test_timings_are_durations() -> None:
    world = _World()
    world.open(1)
    arrived_ns = time.perf_counter_ns() - 1000
    answer = world.session.step(world.ticket, step_request(1, [Row(1, (5,))]), arrived_ns)
    assert answer.queue_ns >= 1000
    assert answer.since_ns == arrived_ns
    assert answer.prepare_ns > 0
    assert answer.results is not None
    assert answer.results.forward_ns == 1000
