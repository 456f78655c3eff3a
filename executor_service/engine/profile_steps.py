"""Steps of given shapes over scratch blocks of the cache, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from executor_service.engine.trial_steps import trial_step
from executor_service.kv_cache.block_table import blocks_for

if TYPE_CHECKING:
    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.profile import StepShape
    from executor_service.engine.step_request import Limits, StepRequest
    from executor_service.kv_cache.manager import KvCacheManager

Clock: TypeAlias = Callable[[], int]
"""Gives nanoseconds that only rise."""


class Steps(Protocol):
    """Computes steps of given shapes."""

    def num_missing(self, shape: StepShape) -> int:
        """Return how many blocks of cache a step of the shape has yet to take."""
        ...

    def take(self, shape: StepShape) -> bool:
        """Take them; False, with nothing taken, where there are too few."""
        ...

    def run(self, shape: StepShape) -> None:
        """Compute a step for which the blocks were taken."""
        ...


class ScratchSteps:
    """Steps over blocks of the cache that are given back at the end of the `with` block.

    The cache must have no open sequence. Its other users find it as before: blocks are cleared
    when they are handed out. Blocks are kept from one shape to the next, so that as little memory
    as possible is touched: where pages are slow to come, that takes longer than the steps.
    """

    def __init__(self, runner: ModelRunner, cache: KvCacheManager, limits: Limits) -> None:
        self._runner = runner
        self._cache = cache
        self._limits = limits
        self._num_rows = 0
        self._requests: dict[StepShape, StepRequest] = {}

    def __enter__(self) -> Self:
        if self._cache.num_sequences:
            raise AssertionError("[profile] the cache must have no open sequence")
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.release(range(self._num_rows))
        self._runner.forget()

    def num_missing(self, shape: StepShape) -> int:
        """Return how many blocks a step of the shape has yet to take."""
        needed = blocks_for(shape.end, self._cache.block_size)
        held = (
            self._cache.num_blocks_of(row) if row < self._num_rows else 0
            for row in range(shape.num_rows)
        )
        return sum(max(0, needed - count) for count in held)

    def take(self, shape: StepShape) -> bool:
        """Take them; False, with nothing taken, where the cache has too few."""
        for row in range(self._num_rows, shape.num_rows):
            self._cache.open(row)
        self._num_rows = max(self._num_rows, shape.num_rows)
        return self._cache.grow(dict.fromkeys(range(shape.num_rows), shape.end))

    def run(self, shape: StepShape) -> None:
        """Compute a step for which the blocks were taken."""
        request = self._requests.get(shape)
        if request is None:
            request = self._requests[shape] = trial_step(
                shape.num_rows, shape.tokens_per_row, shape.context_length, self._limits.vocab_size
            )
        tables = self._cache.block_tables(range(shape.num_rows))
        self._runner.run(request, request.token_ids, tables)
