"""Between core and executor: which statistics to ask for, and the tokens they decide."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core import (
    RequestId,
    SampledRow,
    SamplingParams,
    TokenRow,
    TokenRowBatch,
    WantedPosition,
)
from scheduler_service.sampling import (
    NEED_FULL_ROW,
    Statistic,
    WantedStatistics,
    choose,
    choose_from_full_row,
    is_chosen_by_executor,
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
    # 16 bytes for each token of the requests that asked for digests.
    digests: dict[RequestId, tuple[bytes, ...]]


class StepSampler:
    """Samples the tokens of one model's steps.

    At each wanted position of a row a token is drawn, with the random number of its own absolute
    position. A drafted token is accepted when it equals the one drawn in its place; the first
    that differs ends the row and is a token as well.
    """

    def __init__(self, vocab_size: int, max_top_k: int) -> None:
        """Sample from `vocab_size` ids; the executor gives at most `max_top_k` top-K entries."""
        self._vocab_size = vocab_size
        self._max_top_k = max_top_k

    def is_chosen_by_executor(self, params: SamplingParams) -> bool:
        """Return whether the executor's answer names the token itself."""
        return is_chosen_by_executor(params, self._vocab_size)

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
                question = question._replace(statistics=question.statistics | Statistic.DIGEST)
            questions.append(question)
        return questions

    async def sample(
        self,
        batch: TokenRowBatch,
        questions: list[WantedStatistics],
        answer: StepAnswer,
        fetch_rows: FetchRows,
    ) -> SampledStep:
        """Return the tokens of a step, fetching full rows where the statistics do not decide.

        A full row is fetched only where all drafted tokens before it were accepted.
        """
        rows: dict[RequestId, SampledRow] = {}
        digests: dict[RequestId, tuple[bytes, ...]] = {}
        draws: list[_RowDraw] = []
        first = 0
        for row, error in zip(batch.rows, answer.row_errors, strict=True):
            if error is not None:
                rows[row.request_id] = SampledRow(error=error)
            elif row.wanted:
                draws.append(_RowDraw(row, first))
            first += len(row.wanted)
        unfinished = draws
        while unfinished:
            for draw in unfinished:
                draw.run(questions, answer)
            unfinished = [draw for draw in unfinished if not draw.is_over]
            if unfinished:
                full = await fetch_rows([draw.index for draw in unfinished])
                for draw, logits in zip(unfinished, full, strict=True):
                    u = questions[draw.index].quantile
                    draw.take(choose_from_full_row(draw.position.params, logits, u))
        for draw in draws:
            *accepted, token_id = draw.token_ids
            rows[draw.row.request_id] = SampledRow(token_id, None, tuple(accepted))
            found = answer.digests[draw.first : draw.first + len(draw.token_ids)]
            if found[0]:
                digests[draw.row.request_id] = found
        return SampledStep(rows, digests)


class _RowDraw:
    """The tokens of one row, drawn in order while they equal the drafted ones."""

    __slots__ = ("_drafts", "first", "is_over", "row", "token_ids")

    def __init__(self, row: TokenRow, first: int) -> None:
        """Draw at the row's wanted positions, which have indexes from `first` in the step."""
        self.row = row
        self.first = first
        self.token_ids: list[int] = []
        self.is_over = False
        self._drafts = row.draft_token_ids

    @property
    def index(self) -> int:
        """Index of the next position among the wanted ones of the step."""
        return self.first + len(self.token_ids)

    @property
    def position(self) -> WantedPosition:
        """The next position."""
        return self.row.wanted[len(self.token_ids)]

    def run(self, questions: list[WantedStatistics], answer: StepAnswer) -> None:
        """Draw until the row is over or a position needs its full row."""
        while not self.is_over:
            index = self.index
            params = self.position.params
            token = choose(params, answer.statistics[index], questions[index].quantile)
            if token is NEED_FULL_ROW:
                return
            self.take(int(token))

    def take(self, token_id: int) -> None:
        """Record the token of the next position."""
        count = len(self.token_ids)
        self.token_ids.append(token_id)
        self.is_over = count == len(self._drafts) or token_id != self._drafts[count]


def _wanted(batch: TokenRowBatch) -> list[tuple[TokenRow, WantedPosition]]:
    return [(row, position) for row in batch.rows for position in row.wanted]
