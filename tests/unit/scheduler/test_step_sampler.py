"""Questions to the executor and tokens from its answers."""

import numpy as np
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
    assert step.digests == {RequestId("b"): b"1" * 16}


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
