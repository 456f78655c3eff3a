"""Runs a few steps before the first request, so that it does not pay for first touches.

Caches, page tables and thread pools are warm afterwards. Nothing of the steps stays: their blocks
go back to the pool, which clears a block when it hands it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor_service.engine.step_request import Source, StepRequest
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.step_request import Limits
    from executor_service.kv_cache.manager import KvCacheManager

# One row, as in decoding; several, as in a batch; many, as in a prompt.
ROWS = (1, 4, 32)
_SEQUENCE_ID = 0


def warm_up(runner: ModelRunner, cache: KvCacheManager, limits: Limits) -> None:
    """Run one step for each of ROWS that the limits and the pool allow."""
    for num_tokens in ROWS:
        if num_tokens > min(limits.max_num_batched_tokens, limits.context_length):
            continue
        cache.open(_SEQUENCE_ID)
        if cache.grow({_SEQUENCE_ID: num_tokens}):
            request = _request(num_tokens)
            runner.run(request, request.token_ids, cache.block_tables([_SEQUENCE_ID]))
        cache.release([_SEQUENCE_ID])
    runner.forget()


def _request(num_tokens: int) -> StepRequest:
    return StepRequest(
        step_id=1,
        model_id="",
        released=np.zeros(0, np.uint64),
        sequence_ids=np.array([_SEQUENCE_ID], np.uint64),
        generations=np.zeros(1, np.uint32),
        start_positions=np.zeros(1, np.int32),
        num_tokens=np.array([num_tokens], np.int32),
        sources=np.array([Source.LITERAL], np.uint8),
        source_steps=np.zeros(1, np.uint64),
        source_wanted=np.zeros(1, np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
        wanted=np.array([num_tokens - 1], np.int32),
        statistics=np.array([Stat.ARGMAX | Stat.NORMALIZER], np.uint32),
        top_k=np.zeros(1, np.int32),
        inverse_temperatures=np.ones(1, np.float32),
        quantiles=np.zeros(1, np.float32),
        named_starts=np.zeros(2, np.int32),
        named_ids=np.zeros(0, np.int32),
        edit_starts=np.zeros(2, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
    )
