"""Simulated acceptance against drafting one token after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.acceptance import simulated


def test_all_right_and_all_wrong() -> None:
    found = simulated([[True] * 10], 4)
    assert (found.num_drafted, found.num_accepted, found.num_steps) == (8, 8, 2)
    assert found.tokens_per_step == 5
    found = simulated([[False] * 3], 2)
    assert (found.num_drafted, found.num_accepted, found.num_steps) == (3, 0, 3)
    assert found.share == 0


def test_the_token_behind_a_wrong_one_is_the_verifiers() -> None:
    # Drafted 1 to 3: two are right. The verifier emits the third. The fifth token begins anew.
    found = simulated([[True, True, False, True, False]], 3)
    assert (found.num_drafted, found.num_accepted, found.num_steps) == (4, 3, 2)


def test_texts_do_not_run_into_each_other() -> None:
    apart = simulated([[True], [True, False]], 2)
    assert (apart.num_drafted, apart.num_accepted, apart.num_steps) == (1, 1, 2)


def test_no_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        simulated([], 0)


@given(texts=st.lists(st.lists(st.booleans(), max_size=30), max_size=4), drafts=st.integers(1, 6))
def test_every_token_is_emitted_once(texts: list[list[bool]], drafts: int) -> None:
    found = simulated(texts, drafts)
    assert found.num_accepted + found.num_steps == sum(map(len, texts))
    assert found.num_accepted <= found.num_drafted <= drafts * found.num_steps
    assert found.num_accepted <= sum(map(sum, texts))
