"""Runs a few steps before the first request, so that it does not pay for first touches.

Caches, page tables and thread pools are warm afterwards. Nothing of the steps stays: their blocks
go back to the pool, which clears a block when it hands it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_service.engine.trial_steps import trial_step

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
            request = trial_step(1, num_tokens, 0, limits.vocab_size)
            runner.run(request, request.token_ids, cache.block_tables([_SEQUENCE_ID]))
        cache.release([_SEQUENCE_ID])
    runner.forget()
