"""The draft model's sequences: what it drafts, what it computes again, and how it gives up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from executor_service.drafting.drafter import Drafter
from executor_service.drafting.request import (
    MAX_DRAFTS,
    DraftAnswer,
    DraftLimits,
    DraftOutcome,
    DraftRow,
)
from executor_service.errors import InvalidRequestError
from executor_service.kv_cache.manager import KvCacheManager
from tests.support import fake_backend
from tests.support.fake_backend import FakeBackend, toy_logits

V = 64
BAD = 13
Row = tuple[int, int, Sequence[int], int]  # sequence, first position, tokens, most drafts


@pytest.fixture(autouse=True)
def no_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every token be finite: the toy model drafts any."""
    monkeypatch.setattr(fake_backend, "POISON_TOKEN", -1)


class Setup:
    """A drafter over a toy model."""

    def __init__(
        self, num_blocks: int = 40, *, num_ids: int = V, context_length: int = 200
    ) -> None:
        self.backend = FakeBackend(num_blocks, vocab_size=V)
        self.cache = KvCacheManager(num_blocks, 16, self.backend.zero_blocks)
        self.drafter = Drafter(
            self.backend, self.cache, DraftLimits(8, 120, 2 * V),
            num_ids=num_ids, vocab_size=V, context_length=context_length,
        )  # fmt: skip
        self.open: set[tuple[int, int]] = {(each, 0) for each in range(10)}

    def ask(self, *rows: Row, min_confidence: float = 0.0, generation: int = 0) -> DraftAnswer:
        """Draft for rows."""
        answer = self.drafter.draft(
            request(*rows, min_confidence=min_confidence, generation=generation),
            lambda sequence_id, generation: (sequence_id, generation) in self.open,
        )
        self.drafter.check_integrity()
        return answer


def request(*rows: Row, min_confidence: float = 0.0, generation: int = 0) -> list[DraftRow]:
    """A request of rows."""
    return [DraftRow(row[0], generation, row[1], row[2], row[3], min_confidence) for row in rows]


def greedy(tokens: Sequence[int], count: int) -> list[int]:
    """What the toy model goes on with."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(np.argmax(toy_logits(known, V))))
    return known[len(tokens) :]


def drafts(answer: DraftAnswer) -> list[list[int]]:
    """The drafted tokens of each row."""
    return [list(row.token_ids) for row in answer.rows]


def confidences(answer: DraftAnswer) -> list[float]:
    """The confidences of all rows."""
    return [each for row in answer.rows for each in row.confidences]


def computed(answer: DraftAnswer) -> list[int]:
    """The known positions of each row that are computed."""
    return [row.num_computed for row in answer.rows]


def outcomes(answer: DraftAnswer) -> list[DraftOutcome]:
    """The outcome of each row."""
    return [row.outcome for row in answer.rows]


def test_rows_of_different_lengths_and_numbers_of_drafts_share_their_passes() -> None:
    setup = Setup()
    prompts = {1: [3, 4, 5], 2: list(range(20, 41)), 3: [9]}
    counts = {1: 4, 2: 1, 3: 0}
    answer = setup.ask(*((each, 0, prompts[each], counts[each]) for each in prompts))
    assert drafts(answer) == [greedy(prompts[each], counts[each]) for each in prompts]
    assert computed(answer) == [3, 21, 1]
    assert len(confidences(answer)) == 5
    assert all(0 < each <= 1 for each in confidences(answer))
    assert setup.backend.num_runs == 4


def test_what_was_drafted_and_accepted_is_not_computed_again() -> None:
    setup = Setup()
    prompt = [3, 4, 5]
    (first,) = drafts(setup.ask((1, 0, prompt, 4)))
    before = setup.drafter.counts.tokens_caught_up
    # All four were right, and one token more was drawn: the last draft and that one are new.
    known = [*prompt, *first, 7]
    (second,) = drafts(setup.ask((1, 3, [*first, 7], 2)))
    assert second == greedy(known, 2)
    assert setup.drafter.counts.tokens_caught_up - before == 2
    # The first of them was wrong.
    known = [*known, 11]
    (third,) = drafts(setup.ask((1, 8, [11], 3)))
    assert third == greedy(known, 3)
    assert setup.drafter.counts.tokens_caught_up - before == 3


def test_the_same_request_again_gives_the_same_answer() -> None:
    """The answer to the first one may have been lost with its session."""
    setup = Setup()
    first = setup.ask((1, 0, [3, 4, 5], 3))
    again = setup.ask((1, 0, [3, 4, 5], 3))
    assert drafts(again) == drafts(first)
    assert confidences(again) == confidences(first)


def test_any_course_of_acceptances_is_followed() -> None:
    """Right or wrong drafts, gaps, catching up alone, other generations and releases."""
    rng = random.Random(3)
    setup = Setup()
    known = {each: [rng.randrange(20, V) for _ in range(rng.randrange(1, 30))] for each in range(4)}
    reached = dict.fromkeys(known, 0)
    for _ in range(120):
        rows = []
        for each in rng.sample(list(known), rng.randrange(1, 5)):
            tokens = known[each][reached[each] : reached[each] + 25]
            rows.append((each, reached[each], tokens, rng.randrange(5)))
        answer = setup.ask(*rows)
        assert set(outcomes(answer)) == {DraftOutcome.COMPUTED}
        for (each, start, tokens, count), drafted, num_computed in zip(
            rows, drafts(answer), computed(answer), strict=True
        ):
            assert num_computed == start + len(tokens)
            reached[each] = num_computed
            assert drafted == greedy(known[each][:num_computed], count)
            if num_computed == len(known[each]):
                right = rng.randrange(len(drafted) + 1)
                known[each] += [*drafted[:right], rng.randrange(20, V)]
            if len(known[each]) > 90:
                setup.drafter.release([each])
                known[each], reached[each] = [rng.randrange(20, V)], 0


def test_a_gap_is_answered_with_where_to_start() -> None:
    setup = Setup()
    setup.ask((1, 0, [3, 4, 5], 3))
    answer = setup.ask((1, 4, [6], 2), (2, 1, [6], 2))
    assert outcomes(answer) == [DraftOutcome.BEHIND] * 2
    assert computed(answer) == [3, 0]
    assert drafts(answer) == [[], []]


def test_another_generation_starts_afresh_and_a_closed_sequence_leaves_nothing() -> None:
    setup = Setup()
    setup.ask((1, 0, [3, 4, 5], 3))
    setup.open.add((1, 1))
    answer = setup.ask((1, 3, [6], 2), generation=1)
    assert outcomes(answer) == [DraftOutcome.BEHIND]
    assert computed(answer) == [0]
    answer = setup.ask((7, 0, [6], 2), generation=5)
    assert outcomes(answer) == [DraftOutcome.FAILED]
    assert setup.drafter.num_sequences == 1
    setup.drafter.release_all()
    assert setup.drafter.num_sequences == 0
    assert setup.cache.occupancy().free_blocks == 40


def test_a_full_cache_means_fewer_drafts() -> None:
    setup = Setup(num_blocks=2)
    prompt = list(range(20, 36))
    # The known tokens fill a block; drafts beyond the first need another one, which is there.
    assert [len(each) for each in drafts(setup.ask((1, 0, prompt, 3)))] == [3]
    # Both blocks are taken.
    answer = setup.ask((2, 0, [5], 3))
    assert outcomes(answer) == [DraftOutcome.NO_CAPACITY]
    setup.drafter.release([1])
    assert [len(each) for each in drafts(setup.ask((1, 0, prompt, 3), (2, 0, [5], 3)))] == [3, 0]
    setup.drafter.release_all()
    assert len(drafts(setup.ask((2, 0, [5], 3)))[0]) == 3
    # One block is left: room for the known tokens, and one draft that is never computed.
    assert [len(each) for each in drafts(setup.ask((1, 0, prompt, 3)))] == [1]
    assert setup.drafter.counts.rows_without_capacity == 2


def test_the_context_of_the_draft_model_bounds_its_drafts() -> None:
    setup = Setup(context_length=20)
    prompt = list(range(20, 38))
    assert len(drafts(setup.ask((1, 0, prompt, 8)))[0]) == 3
    answer = setup.ask((1, 18, [5, 6, 7], 1))
    assert outcomes(answer) == [DraftOutcome.FAILED]


def test_b16_ids_of_one_model_alone_are_never_drafted() -> None:
    """Ids from `num_ids` on are padding: a row ends before the first of them."""
    setup = Setup(num_ids=40)
    prompt = next(
        [first, 30]
        for first in range(20, 40)
        if greedy([first, 30], 4)[0] < 40 <= max(greedy([first, 30], 4))
    )
    (found,) = drafts(setup.ask((1, 0, prompt, 4)))
    wanted = greedy(prompt, 4)
    assert found == wanted[: next(i for i, token in enumerate(wanted) if token >= 40)]
    # A token of the target that the draft model has no embedding for ends drafting, not the text.
    answer = setup.ask((1, 2, [V + 3], 1))
    assert outcomes(answer) == [DraftOutcome.FAILED]


def test_a_row_ends_where_the_model_is_not_sure() -> None:
    setup = Setup()
    everything = confidences(setup.ask((1, 0, [3, 4, 5], 8)))
    products = np.cumprod(np.array(everything, np.float64)).tolist()
    least = float(np.float32(products[2])) * 1.0001
    answer = setup.ask((1, 0, [3, 4, 5], 8), min_confidence=least)
    # The token that falls below has been computed already, so it is told.
    wanted = next(i for i, product in enumerate(products) if product < least) + 1
    assert [len(each) for each in drafts(answer)] == [wanted]
    assert 1 <= wanted < 8


def test_a_row_that_is_not_finite_ends_drafting_for_its_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_backend, "POISON_TOKEN", BAD)
    setup = Setup()
    answer = setup.ask((1, 0, [3, BAD], 2), (2, 0, [3, 4], 2))
    assert outcomes(answer) == [DraftOutcome.FAILED, DraftOutcome.COMPUTED]
    assert drafts(answer) == [[], greedy([3, 4], 2)]
    assert outcomes(setup.ask((1, 0, [3], 2))) == [DraftOutcome.FAILED]
    assert setup.drafter.counts.failed_sequences == 1


def test_a_backend_that_fails_ends_drafting_for_those_rows_and_raises_nothing() -> None:
    setup = Setup()
    setup.ask((3, 0, [5], 1))
    setup.backend.fail_next = RuntimeError("no")
    answer = setup.ask((1, 0, [3, 4], 2), (2, 0, [3, 4], 2))
    assert outcomes(answer) == [DraftOutcome.FAILED] * 2
    assert setup.drafter.counts.failed_sequences == 2
    assert outcomes(setup.ask((3, 1, [6], 1))) == [DraftOutcome.COMPUTED]


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([], "row_sequence_ids must have 1..8 rows, got 0"),
        ([(1, 0, [3], 1), (1, 0, [3], 1)], "row_sequence_ids must be different"),
        ([(1, -1, [3], 1)], "row_start_positions must be at least 0, got -1"),
        ([(1, 0, [], 1), (2, 0, [3], 1)], "row_num_tokens must be at least 1, got 0"),
        ([(1, 0, [3], MAX_DRAFTS + 1)], "row_max_drafts must be at most 16, got 17"),
        ([(1, 0, [3], -1)], "row_max_drafts must be at least 0, got -1"),
        ([(1, 0, [3] * 121, 1)], "token_ids must have at most 120 elements, got 121"),
        ([(1, 0, [2 * V], 1)], "token_ids must be at most 127, got 128"),
    ],
)
def test_a_malformed_request_is_refused_and_changes_nothing(rows: list[Row], rule: str) -> None:
    setup = Setup()
    with pytest.raises(InvalidRequestError, match=r"\[draft\] ") as error:
        setup.ask(*rows)
    assert rule in str(error.value)
    assert setup.drafter.num_sequences == 0
    assert setup.backend.num_runs == 0


def test_a_confidence_out_of_range_is_refused() -> None:
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidRequestError, match="row_min_confidences must be in 0"):
            Setup().ask((1, 0, [3], 1), min_confidence=wrong)
