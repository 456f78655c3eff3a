"""Counting blocks, against counting them one token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.capacity import BlockBudget, blocks_for


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "expected"),
    [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)],
)
def test_blocks_for(num_tokens: int, block_size: int, expected: int) -> None:
    """Blocks are counted whole."""
    assert blocks_for(num_tokens, block_size) == expected


@given(
    block_size=st.integers(1, 8),
    ceiling=st.integers(1, 20),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    num_more=st.integers(1, 40),
)
def test_fitting_tokens_equal_a_count_one_by_one(
    block_size: int, ceiling: int, lengths: list[int], num_more: int
) -> None:
    """`num_fitting` is the most tokens the first sequence can grow by, even over the ceiling."""
    budget = BlockBudget(block_size, ceiling)
    for length in lengths:
        budget.hold(length)
    others = sum(blocks_for(length, block_size) for length in lengths[1:])
    fitting = [
        n
        for n in range(1, num_more + 1)
        if others + blocks_for(lengths[0] + n, block_size) <= ceiling
    ]
    assert budget.num_fitting(lengths[0], num_more) == (fitting[-1] if fitting else 0)


def test_growth_and_giving_back_cancel_out() -> None:
    """What was held and grown is given back in full."""
    budget = BlockBudget(4, 10)
    budget.hold(3)
    budget.grow(3, 6)
    assert budget.num_used == 3
    budget.give_back(9)
    assert budget.num_used == 0
