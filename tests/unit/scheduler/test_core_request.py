"""The life of a request: the transition table over all pairs, and its tokens by position."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler_service.core import InvalidTransitionError, Request, RequestStatus
from scheduler_service.core.request import TRANSITIONS, RequestInput
from tests.support.core_scenarios import make_request

# Written out a second time, in other words, so that a slip in the table shows.
LEGAL = {
    ("waiting", "admit"): "running",
    ("waiting", "finish"): "finished",
    ("running", "advance"): "running",
    ("running", "preempt"): "preempted",
    ("running", "finish"): "finished",
    ("preempted", "admit"): "running",
    ("preempted", "finish"): "finished",
}

PAIRS = list(product(RequestStatus, RequestInput))


@pytest.mark.parametrize(("status", "given"), PAIRS)
def test_every_pair_moves_as_the_table_says_or_raises(
    status: RequestStatus, given: RequestInput
) -> None:
    """Each of the 16 pairs leads to its status or to the one documented error."""
    request = make_request("a")
    request.status = status
    following = LEGAL.get((status.value, given.value))
    if following is None:
        with pytest.raises(InvalidTransitionError, match=rf"{status.name}.*{given.name}"):
            request.apply_input(given)
        assert request.status is status
    else:
        request.apply_input(given)
        assert request.status is RequestStatus(following)


def test_the_table_holds_nothing_else() -> None:
    """Nothing leaves FINISHED, and no pair is legal beyond those listed above."""
    assert {(a.value, b.value): c.value for (a, b), c in TRANSITIONS.items()} == LEGAL


def _with_output() -> Request:
    request = make_request("a", [10, 11, 12])
    request.output_token_ids.extend([20, 21])
    return request


def test_tokens_run_from_the_prompt_into_the_output() -> None:
    """Positions count through prompt and output."""
    request = _with_output()
    assert request.num_tokens == 5
    assert [request.token(i) for i in range(5)] == [10, 11, 12, 20, 21]


@pytest.mark.parametrize(("start", "stop"), [(a, b) for a in range(6) for b in range(a, 6)])
def test_a_slice_of_tokens_equals_the_tokens_one_by_one(start: int, stop: int) -> None:
    """Slices on either side of the border and across it."""
    request = _with_output()
    assert request.tokens(start, stop) == tuple([10, 11, 12, 20, 21][start:stop])


def test_uncomputed_tokens_are_the_difference() -> None:
    """Known minus computed."""
    request = _with_output()
    request.num_computed_tokens = 4
    assert request.num_uncomputed_tokens == 1


def test_requests_are_compared_by_identity() -> None:
    """Two requests with equal fields are two requests."""
    assert make_request("a") != make_request("a")
