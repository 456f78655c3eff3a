"""Times steps of a loaded model, before its first session."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

from executor_service.engine.profile import MEASURED, CostPoint, Profile, StepShape, monotone
from executor_service.engine.profile_steps import Clock, ScratchSteps, Steps
from executor_service.engine.profile_tune import tune
from executor_service.kv_cache.block_table import blocks_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor_service.engine.model_runner import ModelRunner
    from executor_service.engine.step_request import Limits
    from executor_service.kv_cache.manager import KvCacheManager

# What a first start may take longer for the measurement.
BUDGET_NS: Final = 1_400_000_000
MAX_REPEATS: Final = 9
# A step that takes less than this part of the budget is cheap.
CHEAP_SHARE: Final = 40
CHEAP_TURNS: Final = 3
# Every step has the kernels of its own size; these cover each of their shapes.
# More decode rows than these would leave buffers for logits behind that few loads need; beyond them
# the curve goes on as steeply.
DECODE_ROWS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
PROMPT_TOKENS: Final = (16, 32, 64, 128, 256, 512)
CONTEXTS: Final = (0, 512, 2048)
# Behind a context, attention adds the same for each row and position, so few shapes are enough;
# each of their rows holds a context of its own, as those of users do.
CONTEXT_DECODE_ROWS: Final[Mapping[int, tuple[int, ...]]] = {512: (1, 4), 2048: (1,)}
CONTEXT_PROMPT_TOKENS: Final[Mapping[int, tuple[int, ...]]] = {512: (128,), 2048: (128,)}


def shapes(limits: Limits, num_blocks: int, block_size: int) -> list[StepShape]:
    """Return the shapes to time that limits and cache allow, those that matter most first.

    A machine that is slow for its model gets through the first ones alone: they span the curve, and
    the others refine it.
    """
    wanted = [StepShape(rows, rows) for rows in DECODE_ROWS]
    wanted += [StepShape(1, tokens) for tokens in PROMPT_TOKENS]
    for context in CONTEXTS[1:]:
        wanted += [StepShape(rows, rows, context) for rows in CONTEXT_DECODE_ROWS[context]]
        wanted += [StepShape(1, tokens, context) for tokens in CONTEXT_PROMPT_TOKENS[context]]
    first = (
        StepShape(1, 1), StepShape(8, 8), StepShape(1, 64), StepShape(4, 4), StepShape(1, 1, 512),
        StepShape(2, 2), StepShape(16, 16), StepShape(1, 256), StepShape(32, 32),
    )  # fmt: skip
    others = sorted(set(wanted) - set(first), key=lambda shape: (shape.num_tokens, shape))
    return [
        shape
        for shape in (*first, *others)
        if _fits(shape, limits) and num_blocks >= shape.num_rows * blocks_for(shape.end, block_size)
    ]


def _fits(shape: StepShape, limits: Limits) -> bool:
    return (
        shape.num_rows <= limits.max_num_seqs
        and shape.num_tokens <= limits.max_num_batched_tokens
        and shape.end <= limits.context_length
    )


def measure(
    runner: ModelRunner,
    cache: KvCacheManager,
    limits: Limits,
    *,
    backend: object = None,
    budget_ns: int | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Profile:
    """Return a new profile; without points where the cache has no room.

    It takes about `budget_ns`, by default BUDGET_NS.

    A `backend` that offers a choice of kernels is left with the fastest.
    """
    begin = clock()
    wanted = shapes(limits, cache.occupancy().free_blocks, cache.block_size)
    with ScratchSteps(runner, cache, limits) as steps:
        choices = tune(backend, steps, limits, clock)
        left = (BUDGET_NS if budget_ns is None else budget_ns) - (clock() - begin)
        durations = time_interleaved(steps, wanted, left, clock)
    points = monotone(
        CostPoint(shape, median, len(found), median)
        for shape, found in durations.items()
        for median in (round(statistics.median(found)),)
    )
    return Profile(MEASURED, 0, points, tuple(sorted(choices.items())))


def time_interleaved(
    steps: Steps, wanted: Sequence[StepShape], budget_ns: int, clock: Clock
) -> dict[StepShape, list[int]]:
    """Time the shapes in turns, so that a slow moment of the machine touches all of them alike.

    The first shape is timed whatever it takes; every other step runs only where it is expected to
    end within the budget. Cheap shapes have the first turns to themselves, and the first time of
    each does not count: memory is touched and kernels are compiled then.
    """
    begin = clock()
    durations: dict[StepShape, list[int]] = {}
    blocks_taken, block_ns = 0, 0
    for turn in range(MAX_REPEATS):
        is_out_of_time = turn >= CHEAP_TURNS
        for shape in wanted:
            found = durations.get(shape)
            expected = max(found) if found else _expected(shape, durations)
            is_cheap = expected * CHEAP_SHARE < budget_ns
            if durations and turn < CHEAP_TURNS and not is_cheap:
                continue
            missing = steps.num_missing(shape)
            cost = expected * (2 if is_cheap and not found else 1) + missing * block_ns // max(
                1, blocks_taken
            )
            if durations and clock() - begin + cost > budget_ns:
                continue
            if missing:
                started = clock()
                if not steps.take(shape):
                    continue
                blocks_taken, block_ns = blocks_taken + missing, block_ns + clock() - started
            nanoseconds = _timed(steps, shape, clock)
            if not found and nanoseconds * CHEAP_SHARE < budget_ns:
                nanoseconds = _timed(steps, shape, clock)
            durations.setdefault(shape, []).append(nanoseconds)
            is_out_of_time = False
        if is_out_of_time:
            break
    return durations


def _timed(steps: Steps, shape: StepShape, clock: Clock) -> int:
    started = clock()
    steps.run(shape)
    return clock() - started


def _expected(shape: StepShape, durations: Mapping[StepShape, Sequence[int]]) -> int:
    """Return a guess from above of what a new shape takes; 0 before any was timed.

    A smaller step times the ratio of tokens, or a larger step, whichever says less. Behind a longer
    context it may take as long again.
    """
    guesses = (
        max(found)
        * max(1, -(-shape.num_tokens // known.num_tokens))
        * (2 if shape.context_length > known.context_length else 1)
        for known, found in durations.items()
    )
    return min(guesses, default=0)
