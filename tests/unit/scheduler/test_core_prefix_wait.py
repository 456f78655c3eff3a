"""Requests with a common prompt that arrive together compute it once, and nobody waits in vain."""

from __future__ import annotations

import pytest

from scheduler_service.core import (
    RequestId,
    SchedulerState,
    SequenceId,
    SequenceOpened,
    cancel,
    capacity_refused,
    executor_restarted,
    opened,
    openings,
    submit,
)
from scheduler_service.core.prefix_wait import common_length
from tests.support.core_scenarios import (
    make_limits,
    make_request,
    must_plan,
    open_waiting,
    run_step,
    shape,
    state_with,
)

A, B = RequestId("a"), RequestId("b")
PROMPT = list(range(12))


def _pair(chunk: int = 4, second: dict[str, object] | None = None) -> SchedulerState:
    """Return a state with two requests of one prompt, whose first one has computed a chunk."""
    fields = {"prompt": PROMPT, "max_tokens": 4, "salt": ""} | (second or {})
    state = state_with(make_limits(chunk=chunk), make_request("a", PROMPT, 4, salt=""))
    submit(state, make_request("b", **fields))  # type: ignore[arg-type]
    run_step(state)
    return state


def test_the_second_waits_until_the_common_blocks_are_computed() -> None:
    """Two of three: at least one token is always computed, for its logits."""
    state = _pair()
    assert shape(run_step(state)[0]) == {"a": (4, 4)}
    batch = must_plan(state, cached={"b": 8})
    assert shape(batch) == {"a": (8, 4), "b": (8, 4)}
    assert state.shares_prefixes


def test_those_behind_pass_one_that_waits() -> None:
    """It is not their prompt."""
    state = state_with(make_limits(chunk=4), make_request("a", PROMPT, salt=""))
    submit(state, make_request("b", PROMPT, salt=""))
    submit(state, make_request("c", PROMPT, salt="another tenant"))
    assert set(shape(run_step(state)[0])) == {"a", "c"}


def test_one_that_waits_keeps_its_place() -> None:
    """Its slot is counted: those behind cannot take the last one."""
    state = state_with(make_limits(chunk=4, seqs=2), make_request("a", PROMPT, salt=""))
    submit(state, make_request("b", PROMPT, salt=""))
    submit(state, make_request("c", PROMPT, salt="another tenant"))
    assert set(shape(run_step(state)[0])) == {"a"}


@pytest.mark.parametrize(
    "second",
    [
        {"salt": "another tenant"},
        {"prompt": PROMPT[:7] + [99] * 5},  # less than two blocks in common
        {"prompt": PROMPT[:8]},  # of two blocks the last token is computed anyway
        {"prompt": [99, *PROMPT[1:]]},
    ],
)
def test_what_saves_too_little_is_not_waited_for(second: dict[str, object]) -> None:
    """One step more has a price too."""
    assert "b" in shape(run_step(_pair(second=second))[0])


def test_many_wait_for_one() -> None:
    """A burst of equal prompts computes the prompt once."""
    state = state_with(make_limits(), *(make_request(n, PROMPT, salt="") for n in "abcdef"))
    assert shape(run_step(state)[0]) == {"a": (0, 12)}
    batch = must_plan(state, cached=dict.fromkeys("bcdef", 8))
    assert batch.num_tokens == 1 + 5 * 4


def test_a_longer_prompt_waits_for_its_start() -> None:
    """As in a conversation whose next turn comes early."""
    state = _pair(second={"prompt": [*PROMPT, 50, 51, 52]})
    run_step(state)
    assert openings(state, 0.0) == (), "the third block is common too"
    run_step(state)
    assert [each.request_id for each in openings(state, 0.0)] == ["b"]


@pytest.mark.parametrize("what", ["cancelled", "refused", "restarted"])
def test_the_wait_ends_with_the_one_that_was_waited_for(what: str) -> None:
    """Gone, or a step without progress: then it computes for itself."""
    state = _pair()
    if what == "cancelled":
        cancel(state, A)
    elif what == "refused":
        batch = must_plan(state)
        assert set(shape(batch)) == {"a"}
        capacity_refused(state, batch)
        assert "b" in shape(run_step(state)[0])
        assert not state.requests[B].may_wait_for_prefix
        return
    else:
        executor_restarted(state)
        assert set(shape(run_step(state)[0])) == {"a"}, "both start afresh"
        return
    assert shape(must_plan(state, cached={"b": 4})) == {"b": (4, 4)}


def test_nobody_waits_for_a_younger_one() -> None:
    """Waits go back in time, so they end."""
    state = _pair()
    state.requests[A].sequence_id = SequenceId(9)
    state.requests[B].prefix_wait = None
    assert [each.request_id for each in openings(state, 0.0)] == ["b"]


def test_waiting_in_vain_is_given_up() -> None:
    """An executor that shares nothing is waited for once, until it is seen to share."""
    state = _pair()
    run_step(state)
    must_plan(state)
    assert not state.shares_prefixes
    state = _pair()
    state.shares_prefixes = False
    assert [each.request_id for each in open_waiting(state, {"b": 8})] == ["b"]
    assert state.shares_prefixes


def test_what_was_cached_before_is_not_waited_for() -> None:
    """The first one's own answer says that the start is there: both run in the next step."""
    state = state_with(make_limits(), *(make_request(n, PROMPT, salt="") for n in "ab"))
    (first,) = openings(state, 0.0)
    opened(state, [SequenceOpened(A, first.sequence_id, 0, 8)])
    assert shape(must_plan(state, cached={"b": 8})) == {"a": (8, 4), "b": (8, 4)}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((), (1,), 0),
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2, 3), (1, 2, 3, 4), 3),
        ((1, 2, 3, 4, 5), (1, 2, 9, 4, 5), 2),
        ((9, 2), (1, 2), 0),
    ],
)
def test_common_length(first: tuple[int, ...], second: tuple[int, ...], expected: int) -> None:
    """Tokens in common at the start alone."""
    assert common_length(first, second) == common_length(second, first) == expected
