"""Steps that are submitted before the one ahead of them has finished."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import Stat, StepOutput
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
PROMPTS = ([5, 6, 7], [9])
# One row draws, the other takes the argmax.
STATISTICS = np.array([Stat.QUANTILE | Stat.NORMALIZER, Stat.ARGMAX], np.uint32)


def _prompts() -> list[Row]:
    return [Row(tokens, 0, (row,)) for row, tokens in enumerate(PROMPTS)]


def _next(tokens: tuple[int, int]) -> list[Row]:
    return [Row([tokens[0]], 3, (0,)), Row([tokens[1]], 1, (1,))]


def _asked(rows: list[Row], **changes: Any) -> Any:
    return make_step(rows, statistics=STATISTICS, top_k=np.zeros(2, np.int32), **changes)


def _answer(output: StepOutput) -> tuple[Any, ...]:
    return (
        bits(output.logits).tolist(), output.argmax_ids.tolist(), output.quantile_ids.tolist(),
        output.non_finite_ops.tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_step_ahead_gets_the_tokens_that_the_step_before_chose(unit: str) -> None:
    """In the order of its sources, which is not that of the rows."""
    plain = make_backend(PROGRAM, unit)
    first = plain.run(_asked(_prompts()))
    drawn, best = int(first.quantile_ids[0]), int(first.argmax_ids[1])
    expected = _answer(first)
    expected_next = _answer(plain.run(_asked(_next((best, drawn)))))

    ahead = make_backend(PROGRAM, unit)
    pending = ahead.submit(_asked(_prompts()))
    following = ahead.submit(_asked(_next((0, 0)), token_sources=np.array([1, 0], np.int32)))
    assert _answer(pending.finish()) == expected
    assert _answer(following.finish()) == expected_next


def test_at_most_two_steps_are_pending_and_they_finish_in_order() -> None:
    backend = make_backend(PROGRAM, UNITS[0])
    pending = backend.submit(_asked(_prompts()))
    following = backend.submit(_asked(_next((1, 2))))
    with pytest.raises(ValueError, match="at most 2 steps may be pending, got one more"):
        backend.submit(_asked(_next((1, 2))))
    with pytest.raises(ValueError, match="finished once and in order, got another one"):
        following.finish()
    pending.finish()
    with pytest.raises(ValueError, match="finished once and in order, got another one"):
        pending.finish()
    following.finish()


def test_a_source_that_is_not_there_is_refused() -> None:
    """Nothing was submitted immediately before, or it wanted fewer positions."""
    backend = make_backend(PROGRAM, UNITS[0])
    backend.run(_asked(_prompts()))
    lone = backend.submit(_asked(_next((0, 0)), token_sources=np.array([0, 1], np.int32)))
    with pytest.raises(ValueError, match="token_sources must be one a token, below 0"):
        lone.finish()
    pending = backend.submit(_asked(_prompts()))
    following = backend.submit(_asked(_next((0, 0)), token_sources=np.array([0, 2], np.int32)))
    pending.finish()
    with pytest.raises(ValueError, match="token_sources must be one a token, below 2"):
        following.finish()
