"""Questions to the executor and tokens from its answers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_service.core import (
    RequestId,
    SamplingParams,
    SequenceId,
    TokenRow,
    TokenRowBatch,
    WantedPosition,
)
from scheduler_service.sampling import (
    RowStatistics,
    Statistic,
    choose_from_full_row,
    row_statistics,
)
from scheduler_service.step_sampler import StepSampler
from scheduler_service.wire.executor import StepAnswer

V = 50
GREEDY = SamplingParams()
FREE = SamplingParams(temperature=1.0, seed=3)
WIDE = SamplingParams(temperature=9.0, top_p=0.95, seed=4)
LOGITS = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32)


def _row(name: str, params: SamplingParams | None) -> TokenRow:
    wanted = () if params is None else (WantedPosition(1, 7, params),)
    return TokenRow(RequestId(name), SequenceId(ord(name)), 0, (1, 2), 5, wanted)


BATCH = TokenRowBatch(
    1, "m", (_row("a", GREEDY), _row("p", None), _row("b", FREE), _row("c", WIDE))
)


def _answer(sampler: StepSampler, errors: tuple[str | None, ...] = (None,) * 4) -> StepAnswer:
    statistics: list[RowStatistics] = []
    for index, question in enumerate(sampler.questions(BATCH, ())):
        statistics.append(
            row_statistics(
                LOGITS[index],
                inverse_temperature=question.inverse_temperature,
                u=question.quantile,
                top_k=question.top_k,
            )
        )
    return StepAnswer(1, errors, tuple(statistics), (b"", b"1" * 16, b""))


async def _no_rows(indexes: list[int]) -> NDArray[np.float32]:
    raise AssertionError(f"nothing must be fetched, got {indexes}")


def test_each_wanted_position_gets_the_statistics_it_needs() -> None:
    sampler = StepSampler(V, max_top_k=16)
    greedy, free, wide = sampler.questions(BATCH, {RequestId("b")})
    assert greedy.statistics == Statistic.ARGMAX
    assert free.statistics == Statistic.QUANTILE | Statistic.NORMALIZER | Statistic.DIGEST
    assert wide.statistics == Statistic.TOP_K | Statistic.NORMALIZER
    assert wide.top_k == 16


async def test_undecided_rows_are_fetched_together_and_decide_as_full_rows() -> None:
    sampler = StepSampler(V, max_top_k=2)
    fetched: list[list[int]] = []

    async def fetch(indexes: list[int]) -> NDArray[np.float32]:
        fetched.append(indexes)
        return LOGITS[indexes]

    questions = sampler.questions(BATCH, ())
    step = await sampler.sample(BATCH, questions, _answer(sampler), fetch)
    assert fetched == [[2]]
    for index, (name, params) in enumerate([("a", GREEDY), ("b", FREE), ("c", WIDE)]):
        expected = choose_from_full_row(params, LOGITS[index], questions[index].quantile)
        assert step.rows[RequestId(name)].token_id == expected
    assert RequestId("p") not in step.rows
    assert step.digests == {RequestId("b"): (b"1" * 16,)}


async def test_bad_rows_have_an_error_and_no_token_and_are_not_fetched() -> None:
    sampler = StepSampler(V, max_top_k=2)
    errors = (None, "prefill broke", None, "decode broke")
    step = await sampler.sample(
        BATCH, sampler.questions(BATCH, ()), _answer(sampler, errors), _no_rows
    )
    assert step.rows[RequestId("p")].error == "prefill broke"
    assert step.rows[RequestId("c")].error == "decode broke"
    assert step.rows[RequestId("c")].token_id is None
    assert step.rows[RequestId("a")].error is None


def _verify_row(drafts: tuple[int, ...], params: SamplingParams) -> TokenRowBatch:
    wanted = tuple(WantedPosition(i, 6 + i, params) for i in range(len(drafts) + 1))
    row = TokenRow(
        RequestId("a"), SequenceId(1), 0, (9, *drafts), 5, wanted, num_draft_tokens=len(drafts)
    )
    return TokenRowBatch(1, "m", (_row("p", None), row))


def _verify_answer(sampler: StepSampler, batch: TokenRowBatch) -> StepAnswer:
    questions = sampler.questions(batch, {RequestId("a")})
    statistics = tuple(
        row_statistics(
            LOGITS[index],
            inverse_temperature=question.inverse_temperature,
            u=question.quantile,
            top_k=question.top_k,
        )
        for index, question in enumerate(questions)
    )
    digests = tuple(bytes([index]) * 16 for index in range(1, len(questions) + 1))
    return StepAnswer(1, (None, None), statistics, digests)


def _expected(params: SamplingParams) -> tuple[int, ...]:
    sampler = StepSampler(V, max_top_k=16)
    questions = sampler.questions(_verify_row((0, 0, 0), params), ())
    return tuple(
        choose_from_full_row(params, logits, question.quantile)
        for logits, question in zip(LOGITS, questions, strict=True)
    )


@pytest.mark.parametrize("params", [GREEDY, FREE, WIDE], ids=["greedy", "free", "wide"])
@pytest.mark.parametrize("num_right", range(4))
async def test_drafts_are_accepted_while_they_are_what_is_drawn(
    params: SamplingParams, num_right: int
) -> None:
    """Each position draws with its own random number, whatever the drafts are."""
    expected = _expected(params)
    drafts = tuple(t if i < num_right else (t + 1) % V for i, t in enumerate(expected[:3]))
    batch = _verify_row(drafts, params)
    sampler = StepSampler(V, max_top_k=16)

    async def fetch(indexes: list[int]) -> NDArray[np.float32]:
        return LOGITS[indexes]

    questions = sampler.questions(batch, {RequestId("a")})
    step = await sampler.sample(batch, questions, _verify_answer(sampler, batch), fetch)
    row = step.rows[RequestId("a")]
    assert row.accepted_token_ids == expected[:num_right]
    assert row.token_id == expected[num_right]
    found = step.digests[RequestId("a")]
    assert found == tuple(bytes([i]) * 16 for i in range(1, num_right + 2))


async def test_full_rows_are_fetched_only_as_far_as_drafts_are_accepted() -> None:
    """With too few entries to decide, each position waits for the one before it."""
    expected = _expected(WIDE)
    batch = _verify_row((expected[0], (expected[1] + 1) % V, expected[2]), WIDE)
    sampler = StepSampler(V, max_top_k=1)
    fetched: list[list[int]] = []

    async def fetch(indexes: list[int]) -> NDArray[np.float32]:
        fetched.append(indexes)
        return LOGITS[indexes]

    questions = sampler.questions(batch, {RequestId("a")})
    step = await sampler.sample(batch, questions, _verify_answer(sampler, batch), fetch)
    assert fetched == [[0], [1]]
    assert step.rows[RequestId("a")].accepted_token_ids == expected[:1]
    assert step.rows[RequestId("a")].token_id == expected[1]
