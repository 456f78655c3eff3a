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
    summed=st.integers(-3, 10),
    counted=st.none() | st.integers(-3, 10),
    num_tokens=st.integers(0, 30),
    num_more=st.integers(1, 40),
)
def test_fitting_tokens_equal_a_count_one_by_one(
    block_size: int, summed: int, counted: int | None, num_tokens: int, num_more: int
) -> None:
    """`num_fitting` is the most tokens whose new blocks the larger bound allows."""
    budget = BlockBudget(block_size, summed, counted)
    spare = max(summed, summed if counted is None else counted)
    assert budget.num_spare == spare
    held = blocks_for(num_tokens, block_size)
    fitting = [
        n
        for n in range(num_more + 1)
        if blocks_for(num_tokens + n, block_size) - held <= max(0, spare)
    ]
    assert budget.num_fitting(num_tokens, num_more) == fitting[-1]


def test_growth_and_giving_back_cancel_out() -> None:
    """What was grown is given back in full where nothing is shared."""
    budget = BlockBudget(4, 10, 7)
    budget.grow(3, 6)
    assert budget.num_spare == 8
    budget.give_back(9)
    assert budget.num_spare == 11


def test_only_blocks_that_nobody_can_share_are_sure_to_come_free() -> None:
    """Of a victim's five blocks up to three may have another holder."""
    budget = BlockBudget(4, -20, 0, num_shared=3)
    budget.give_back(20)
    assert budget.num_spare == 2
    budget.give_back(8)
    assert budget.num_spare == 2


def test_the_larger_bound_counts() -> None:
    """The executor's counts see sharing; own sums see what is about to be given back."""
    assert BlockBudget(4, 2, 5).num_spare == 5
    assert BlockBudget(4, 5, 2).num_spare == 5
