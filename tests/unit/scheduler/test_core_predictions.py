"""Predicted lengths and memory, and the measured rate of service."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import RequestId, submit
from scheduler_service.core.output_lengths import MIN_SAMPLES, OutputLengths, peak_blocks
from scheduler_service.core.service_rate import DEFAULT_RETRY_SECONDS, ServiceRate
from tests.support.core_scenarios import (
    make_limits,
    make_request,
    must_plan,
    run_step,
    shape,
    state_with,
)


def _learned(*lengths: int, client: str = "") -> OutputLengths:
    known = OutputLengths()
    _learn(known, *lengths, client=client)
    return known


def _learn(known: OutputLengths, *lengths: int, client: str = "") -> None:
    for length in lengths:
        request = make_request("a", client=client)
        request.output_token_ids.extend([0] * length)
        known.record(request)


def test_nothing_is_known_at_first() -> None:
    """One token is promised until enough requests have finished."""
    assert _learned(*[50] * (MIN_SAMPLES - 1)).num_remaining(make_request("a", 1, 100)) == 1
    assert _learned(*[50] * MIN_SAMPLES).num_remaining(make_request("a", 1, 100)) == 50


def test_the_prediction_is_a_quantile_and_never_above_max_tokens() -> None:
    """Of the lengths 1 to 100, half are at most 50."""
    known = _learned(*range(1, 101))
    assert known.num_remaining(make_request("a", 1, 1000)) == 51
    assert known.num_remaining(make_request("a", 1, 30)) == 30


def test_a_request_is_compared_with_longer_ones_only() -> None:
    """What it has generated rules the shorter ones out; beyond all of them nothing is known."""
    known = _learned(*range(1, 101))
    request = make_request("a", 1, 1000)
    request.output_token_ids.extend([0] * 90)
    assert known.num_remaining(request) == 6
    request.output_token_ids.extend([0] * 10)
    assert known.num_remaining(request) == 1


def test_a_client_is_predicted_by_its_own_requests_once_there_are_enough() -> None:
    """Until then by those of all."""
    known = _learned(*[100] * 50, client="other")
    request = make_request("a", 1, 1000, client="mine")
    _learn(known, *[5] * (MIN_SAMPLES - 1), client="mine")
    assert known.num_remaining(request) == 100
    _learn(known, 5, client="mine")
    assert known.num_remaining(request) == 5


def test_old_lengths_and_old_clients_are_forgotten() -> None:
    """The sample follows what clients do now and stays bounded."""
    known = _learned(*[100] * 300, *[3] * 300, client="a")
    assert known.num_remaining(make_request("a", 1, 1000, client="a")) == 3
    for number in range(1000):
        _learn(known, 1, client=str(number))
    assert len(known._by_client) == 64


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_the_peak_is_an_upper_bound_of_what_is_needed_at_any_time(
    needs: list[tuple[int, int]], size: int
) -> None:
    """All grow by one position a step and leave after their last; checked step by step."""
    peak = peak_blocks(needs, size)
    for step in range(31):
        held = sum(-(-(length + step) // size) for more, length in needs if step <= more)
        assert held <= peak
    assert peak <= sum(-(-(length + more) // size) for more, length in needs) + len(needs)
    if len(needs) == 1:
        assert peak == -(-(needs[0][1] + needs[0][0]) // size)


def test_requests_that_end_one_after_another_need_less_than_their_sum() -> None:
    """The short ones are gone before the long one is long."""
    assert peak_blocks([(0, 100), (0, 100), (300, 100)], 10) < 10 + 10 + 40


def test_admission_counts_on_the_predicted_growth() -> None:
    """Known to be long, a second request waits; known to be short, it runs beside the first."""
    for length, together in ((2, "ab"), (40, "a")):
        limits = make_limits(blocks=16, block_size=4)
        state = state_with(limits, make_request("a", 8, 50), make_request("b", 8, 50))
        _learn(state.output_lengths, *[length] * 20)
        assert set(shape(must_plan(state))) == set(together)


@pytest.mark.parametrize(("num_granted", "together"), [(0, "ab"), (16, "a")])
def test_admission_does_not_count_on_blocks_that_are_held_for_drafts(
    num_granted: int, together: str
) -> None:
    """They are in use as long as their request runs, whether or not its drafts were accepted."""
    state = state_with(make_limits(blocks=6, block_size=4), make_request("a", 6, 9))
    run_step(state)
    state.requests[RequestId("a")].num_granted_tokens = num_granted
    submit(state, make_request("b", 9, 1))
    assert set(shape(must_plan(state))) == set(together)


def test_the_hint_before_anything_was_measured_is_a_constant() -> None:
    """There is nothing better to say."""
    assert ServiceRate().retry_seconds() == DEFAULT_RETRY_SECONDS
    assert ServiceRate().token_seconds is None
    assert ServiceRate().cached_share == 0.0


def test_the_hint_follows_the_time_between_admissions() -> None:
    """Two seconds a request of a hundred tokens: ten of them, or as many tokens, take twenty."""
    rate = ServiceRate()
    for number in range(1, 30):
        rate.record_admission(0.0, 2.0 * number, 100, 0)
    assert rate.retry_seconds() == pytest.approx(2.0)
    assert rate.retry_seconds(num_requests=10) == pytest.approx(20.0)
    assert rate.retry_seconds(num_tokens=1000) == pytest.approx(20.0)
    assert rate.retry_seconds(num_requests=10_000) == 60.0


def test_idle_time_is_not_service_time() -> None:
    """Requests that find the queue empty are admitted at once."""
    rate = ServiceRate()
    for now in itertools.islice(itertools.count(0.0, 1000.0), 5):
        rate.record_admission(now, now + 0.01, 10, 0)
    assert rate.retry_seconds() == pytest.approx(0.05)


def test_the_speed_of_prompts_comes_from_steps_that_compute_prompts() -> None:
    """Steps of one token a request say nothing of it; cached ones are counted apart."""
    rate = ServiceRate()
    rate.record_step(num_prompt_tokens=0, num_tokens=64, seconds=1.0)
    rate.record_step(num_prompt_tokens=4, num_tokens=4, seconds=1.0)
    assert rate.token_seconds is None
    for _ in range(5):
        rate.record_step(num_prompt_tokens=200, num_tokens=200, seconds=0.5)
        rate.record_step(num_prompt_tokens=100, num_tokens=300, seconds=50.0)
    assert rate.token_seconds == pytest.approx(1 / 400)
    rate.record_admission(0.0, 0.0, 100, 75)
    assert rate.cached_share == 0.75
