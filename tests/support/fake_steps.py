"""What the fake executor keeps of its last steps, and the tokens that others take from them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2
from scheduler_service.sampling import Statistic
from tests.support.fake_answers import array


@dataclass(frozen=True, slots=True, eq=False)
class KeptAnswer:
    """An answer and what else may be asked of it."""

    step_id: int
    result: token_rows_pb2.StepResult
    rows: list[np.ndarray[Any, Any]]
    statistics: bytes

    def chosen(self, index: int) -> int:
        """Return the token chosen at a wanted position."""
        asked = Statistic(array(self.statistics, "<u4")[index])
        ids = self.result.argmax_ids
        if Statistic.QUANTILE in asked:
            ids = self.result.quantile_ids
        token: int = array(ids, "<i4")[index]
        return token


def tokens_of(
    step: token_rows_pb2.Step, lengths: Sequence[int], kept: Sequence[KeptAnswer]
) -> list[int] | None:
    """Return all tokens, outputs filled in; None where the step that has them did not run."""
    tokens = array(step.token_ids, "<i4")
    start = 0
    for kind, step_id, index, length in zip(
        step.row_token_sources, array(step.row_source_steps, "<u8"),
        array(step.row_source_wanted, "<i4"), lengths, strict=False,
    ):  # fmt: skip
        if kind == token_rows_pb2.TOKEN_SOURCE_STEP_OUTPUT:
            last = kept[-1]
            if last.step_id != step_id or length != 1 or tokens[start]:
                raise ValueError(f"row must be one token of step {last.step_id}")
            if last.result.outcome != token_rows_pb2.STEP_OUTCOME_COMPUTED:
                return None
            tokens[start] = last.chosen(index)
        start += length
    return tokens


async def until_fenced(
    fence: asyncio.Event, requests: AsyncIterator[pb.SessionRequest]
) -> AsyncIterator[pb.SessionRequest]:
    """Give out requests until the stream ends or the fence is set."""
    fenced = asyncio.ensure_future(fence.wait())
    following: asyncio.Future[pb.SessionRequest] | None = None
    try:
        while not fence.is_set():
            following = asyncio.ensure_future(anext(requests))
            await asyncio.wait({fenced, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        fenced.cancel()
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
