"""Builds a backend's StepInput from a checked step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.step import StepInput

if TYPE_CHECKING:
    from executor_service.engine.step_request import Int32, StepRequest


_NO_SOURCES = np.zeros(0, np.int32)


def build_step_input(
    request: StepRequest,
    token_ids: Int32,
    block_tables: Int32,
    token_sources: Int32 | None = None,
) -> StepInput:
    """Return the input of a step with at least one row.

    `token_ids` (T,) has STEP_OUTPUT rows filled in, but for those of `token_sources` (T,);
    `block_tables` is (S, max_blocks), -1 past the end of a row's blocks.
    """
    lengths = request.num_tokens
    if len(token_ids) == len(lengths):  # one token a row
        query_start_loc, positions = _counting_to(len(lengths)), request.start_positions
    else:
        query_start_loc = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        # A token's position is its row's start plus its distance from the row's first token.
        offsets = np.repeat(request.start_positions - query_start_loc[:-1], lengths)
        positions = (np.arange(len(token_ids), dtype=np.int32) + offsets).astype(np.int32)
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        block_tables=block_tables,
        wanted=request.wanted,
        statistics=request.statistics,
        top_k=request.top_k,
        inverse_temperatures=request.inverse_temperatures,
        quantiles=request.quantiles,
        edit_starts=request.edit_starts,
        edit_ids=request.edit_ids,
        edit_values=request.edit_values,
        token_sources=_NO_SOURCES if token_sources is None else token_sources,
    )


@functools.lru_cache(maxsize=64)
def _counting_to(last: int) -> Int32:
    numbers = np.arange(last + 1, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers
