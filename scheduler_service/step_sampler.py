"""Between core and executor: which statistics to ask for, and the tokens they decide."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core import RequestId, SampledRow, TokenRow, TokenRowBatch, WantedPosition
from scheduler_service.sampling import (
    NEED_FULL_ROW,
    Statistic,
    WantedStatistics,
    choose,
    choose_from_full_row,
    wanted_statistics,
    with_runner_up,
)
from scheduler_service.wire.executor import StepAnswer

# Takes indexes into the wanted positions of the step, gives (len, V) float32 logits.
FetchRows = Callable[[list[int]], Awaitable[NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What came of a step, by request."""

    rows: dict[RequestId, SampledRow]
    # 16 bytes for each request that asked for digests.
    digests: dict[RequestId, bytes]


class StepSampler:
    """Samples the tokens of one model's steps. The last wanted position of a row is its token."""

    def __init__(self, vocab_size: int, max_top_k: int) -> None:
        """Sample from `vocab_size` ids; the executor gives at most `max_top_k` top-K entries."""
        self._vocab_size = vocab_size
        self._max_top_k = max_top_k

    def questions(
        self,
        batch: TokenRowBatch,
        digest_ids: Collection[RequestId],
        traced_ids: Collection[RequestId] = (),
    ) -> list[WantedStatistics]:
        """Return what to ask for at each wanted position; a pure function, so a repeat is equal.

        Requests in `digest_ids` get digests of their logits as well, those in `traced_ids` also
        their two largest logits.
        """
        questions = []
        for row, position in _wanted(batch):
            question = wanted_statistics(
                position.params,
                position.drawn_position,
                vocab_size=self._vocab_size,
                max_top_k=self._max_top_k,
            )
            if row.request_id in traced_ids:
                question = with_runner_up(
                    question, vocab_size=self._vocab_size, max_top_k=self._max_top_k
                )
            if row.request_id in digest_ids or row.request_id in traced_ids:
                question = replace(question, statistics=question.statistics | Statistic.DIGEST)
            questions.append(question)
        return questions

    async def sample(
        self,
        batch: TokenRowBatch,
        questions: list[WantedStatistics],
        answer: StepAnswer,
        fetch_rows: FetchRows,
    ) -> SampledStep:
        """Return the tokens of a step, fetching full rows where the statistics do not decide."""
        rows = {
            row.request_id: SampledRow(error=error)
            for row, error in zip(batch.rows, answer.row_errors, strict=True)
            if error is not None
        }
        digests: dict[RequestId, bytes] = {}
        undecided: list[tuple[int, RequestId, WantedPosition]] = []
        for index, (row, position) in enumerate(_wanted(batch)):
            request_id = row.request_id
            if request_id in rows and rows[request_id].error is not None:
                continue
            if answer.digests[index]:
                digests[request_id] = answer.digests[index]
            u = questions[index].quantile
            token = choose(position.params, answer.statistics[index], u)
            if token is NEED_FULL_ROW:
                undecided.append((index, request_id, position))
            else:
                rows[request_id] = SampledRow(token_id=int(token))
        if undecided:
            full = await fetch_rows([index for index, _, _ in undecided])
            for (index, request_id, position), logits in zip(undecided, full, strict=True):
                token_id = choose_from_full_row(position.params, logits, questions[index].quantile)
                rows[request_id] = SampledRow(token_id=token_id)
        return SampledStep(rows, digests)


def _wanted(batch: TokenRowBatch) -> list[tuple[TokenRow, WantedPosition]]:
    return [(row, position) for row in batch.rows for position in row.wanted]
