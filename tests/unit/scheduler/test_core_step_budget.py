"""How a step is shared by the cost curve: bound, chunks that pay, and who goes first."""

from __future__ import annotations

import dataclasses
import math

import pytest

from scheduler_service.core import (
    CostCurve,
    CostPoint,
    Limits,
    Priority,
    Request,
    RequestId,
    SchedulerState,
    TokenRowBatch,
    record_step_seconds,
    submit,
)
from scheduler_service.core.step_budget import StepLoad, step_bound
from tests.support.core_scenarios import (
    make_limits,
    make_request,
    must_plan,
    run_step,
    shape,
    state_with,
)

# Seconds: a step of weights alone, and what each row adds. Chunks of 40 are at 90 % of the best.
BASE, ROW = 4.0, 1.0
CURVE = CostCurve(
    [
        *(CostPoint(n, n, 0, BASE + n * ROW) for n in (1, 2, 4, 8, 16)),
        *(CostPoint(1, n, 0, BASE + n * ROW) for n in (16, 32, 64, 128, 256)),
        CostPoint(1, 1, 100, BASE + ROW + 1.0),
        CostPoint(1, 16, 100, BASE + 16 * ROW + 16.0),
    ]
)
POSITION = 0.01
FLAT = CostCurve([point for point in CURVE.points if not point.context_length])


def _limits(
    *, bound: float = 0.0, curve: CostCurve = CURVE, chunk: int = 512, tokens: int = 1024
) -> Limits:
    limits = make_limits(tokens=tokens, chunk=chunk, blocks=2000, context=4000, seqs=64, waiting=99)
    return dataclasses.replace(limits, cost_curve=curve, max_step_seconds=bound)


def _decoding(limits: Limits, count: int, *prompts: int) -> SchedulerState:
    """Return a state in which `count` requests decode behind one position and prompts wait."""
    state = state_with(limits, *(make_request(f"d{i}", 1, 500) for i in range(count)))
    run_step(state)
    for index, prompt in enumerate(prompts):
        submit(state, make_request(f"p{index}", prompt, 50))
    return state


def _prompts(batch: TokenRowBatch) -> dict[str, tuple[int, int]]:
    return {name: span for name, span in shape(batch).items() if name.startswith("p")}


def test_beside_decode_rows_a_prompt_gets_what_fits_in_the_bound() -> None:
    """30 s less 4 for the weights and 2 decode rows behind one position each: 23 tokens."""
    state = _decoding(_limits(bound=30.0), 2, 900)
    batch = must_plan(state)
    assert _prompts(batch) == {"p0": (0, 23)}
    assert batch.bound_seconds == 30.0
    assert batch.predicted_seconds == pytest.approx(29 + 2 * POSITION)


def test_deep_in_a_context_a_chunk_is_smaller() -> None:
    """Each token pays for 400 positions before its row: five times the price."""
    state = _decoding(_limits(bound=30.0), 2, 900)
    must_plan_prompt = state.requests[RequestId("p0")]
    run_step(state)
    must_plan_prompt.num_computed_tokens = 400
    assert _prompts(must_plan(state)) == {"p0": (400, int((30 - 6 - 0.04) / 5))}


def test_with_nobody_decoding_a_chunk_is_as_large_as_it_may_be() -> None:
    """Time is not bounded then."""
    batch = must_plan(state_with(_limits(bound=30.0), make_request("p", 900)))
    assert shape(batch) == {"p": (0, 512)}
    assert batch.bound_seconds == math.inf
    assert batch.predicted_seconds == pytest.approx(BASE + 512 * ROW)


def test_without_a_curve_nothing_is_bounded() -> None:
    """As before there was one."""
    state = _decoding(_limits(bound=30.0, curve=CostCurve()), 2, 900)
    batch = must_plan(state)
    assert _prompts(batch) == {"p0": (0, 512)}
    assert (batch.bound_seconds, batch.predicted_seconds) == (math.inf, 0.0)


@pytest.mark.parametrize(
    ("num_decoding", "expected"),
    [(1, 6 * (BASE + ROW)), (16, BASE + 80 * ROW), (200, 2 * (BASE + 200 * ROW))],
)
def test_the_derived_bound(num_decoding: int, expected: float) -> None:
    """With a chunk at 95 % of the best tokens a second; two to six times what decoding takes."""
    state = SchedulerState(_limits())
    load = StepLoad(CURVE, num_decoding)
    assert step_bound(state, load) == expected
    flat = CostCurve([CostPoint(1, n, 0, 5.0 + n / 1e9) for n in (1, 16)])
    state.limits = _limits(curve=flat)
    assert step_bound(state, StepLoad(flat, 1)) == pytest.approx(20.0), "four decode steps"


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    # Ten steps of a fast machine; a tenth of a second; two steps of their own, which is more.
    [(2.0, 0.02), (8.0, 0.08), (15.0, 0.1), (40.0, 0.1), (60.0, 0.12)],
)
def test_the_derived_bound_grows_as_far_as_nobody_notices(
    milliseconds: float, expected: float
) -> None:
    """On a machine whose steps cost the same for each token, as long as prompts gain by it."""
    seconds = milliseconds / 1000
    points = [CostPoint(n, n, 0, seconds / 8 * n) for n in (1, 8)]
    points += [CostPoint(1, n, 0, seconds / 8 * n) for n in (16, 512)]
    curve = CostCurve(points)
    bound = step_bound(SchedulerState(_limits(curve=curve)), StepLoad(curve, 8))
    assert bound == pytest.approx(expected)
    set_bound = step_bound(SchedulerState(_limits(curve=curve, bound=7.0)), StepLoad(curve, 8))
    assert set_bound == 7.0, "one that was set stays what it is"


def test_a_bound_below_the_decode_rows_themselves_still_lets_prompts_on() -> None:
    """By a tenth of what they take."""
    state = _decoding(_limits(bound=1.0), 40, 900)
    assert _prompts(must_plan(state)) == {"p0": (0, 4)}
    state = _decoding(_limits(bound=1.0), 2, 900)
    assert _prompts(must_plan(state)) == {"p0": (0, 1)}, "one token of the oldest at least"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The first has half and what the shorter ones leave; who cannot end in this step waits."""
    state = _decoding(_limits(bound=30.0), 2, 900, 8, 900, 3)
    batch = must_plan(state)
    assert _prompts(batch) == {"p0": (0, 12), "p1": (0, 8), "p3": (0, 3)}
    state = _decoding(_limits(bound=30.0), 2, 900, 11, 4)
    assert _prompts(must_plan(state)) == {"p0": (0, 19), "p2": (0, 4)}


def test_what_is_mostly_cached_does_not_wait_for_a_long_prompt() -> None:
    """It is opened before there is time for all of it, and what is left fits beside the others."""
    state = _decoding(_limits(bound=30.0), 2, 900)
    run_step(state)
    submit(state, make_request("p1", 800, 50))
    batch = must_plan(state, cached={"p1": 797})
    assert _prompts(batch)["p1"] == (797, 1), "the first that waits may be cut"
    assert _prompts(batch)["p0"][1] >= 8


def test_those_behind_the_first_that_waits_pass_it_only_whole() -> None:
    """A prompt that is cut runs from then on, before those that wait."""
    state = _decoding(_limits(bound=30.0), 2, 900)
    run_step(state)
    for name, length in (("p1", 890), ("p2", 20), ("p3", 4)):
        submit(state, make_request(name, length, 50))
    assert set(_prompts(must_plan(state))) == {"p0", "p3"}


def test_a_prompt_of_a_higher_class_is_the_first() -> None:
    """It gets half of the step's time from one that runs; the oldest running one gets a token."""
    state = SchedulerState(_limits(bound=30.0))
    submit(state, make_request("p0", 900, 50, priority=Priority.BATCH))
    run_step(state)
    for index in range(2):
        submit(state, make_request(f"d{index}", 1, 500))
    run_step(state)
    submit(state, make_request("p1", 900, 50, priority=Priority.INTERACTIVE))
    shares = _prompts(must_plan(state))
    assert shares["p1"][1] > 10
    assert shares["p0"][1] == 1


def test_the_oldest_prompt_is_never_passed_for_good() -> None:
    """However many short ones keep coming, half of each step is its own: ten tokens and more."""
    state = _decoding(_limits(bound=30.0, curve=FLAT), 2, 240)
    request: Request = state.requests[RequestId("p0")]
    num_steps = 0
    while request.num_uncomputed_tokens > 1:
        submit(state, make_request(f"p{num_steps + 1}", 9, 1))
        run_step(state)
        num_steps += 1
    assert num_steps <= 24


def test_a_step_does_not_end_where_rows_cost_more() -> None:
    """A kernel path that begins at 33 tokens doubles the price: 32 are computed a second faster."""
    steep: list[CostPoint] = [CostPoint(1, n, 0, BASE + n * ROW) for n in (1, 16, 32)]
    steep += [CostPoint(1, n, 0, BASE + 2 * n * ROW) for n in (33, 64)]
    limits = _limits(curve=CostCurve(steep))
    state = state_with(limits, make_request("p", 600))
    assert shape(run_step(state)[0]) == {"p": (0, 32)}
    # The last chunk is left whole: it would cost one step more.
    state = state_with(limits, make_request("p", 40))
    assert shape(run_step(state)[0]) == {"p": (0, 40)}


def _slowed(state: SchedulerState, batch: TokenRowBatch, factor: float) -> None:
    for _ in range(300):
        record_step_seconds(state, batch, factor * batch.predicted_seconds)


def test_beside_decode_rows_a_little_worse_is_no_reason_to_cut() -> None:
    """It would make the prompt wait for more steps; a price that doubles is one."""
    for price, expected in ((1.15, 60), (3.0, 31)):
        points = [CostPoint(n, n, 0, BASE + n) for n in (1, 8)]
        points += [CostPoint(1, n, 0, BASE + n) for n in (16, 32)]
        points.append(CostPoint(1, 96, 0, BASE + 32 + 64 * price))
        state = _decoding(
            _limits(bound=100.0 if price > 2 else 70.0, curve=CostCurve(points)), 1, 900
        )
        num_tokens = _prompts(must_plan(state))["p0"][1]
        assert num_tokens == expected, price


def test_beside_decode_rows_only_what_prompts_add_counts() -> None:
    """Deep in a context their tokens cost more than those of decode rows: no reason to cut."""
    limits = _limits(bound=100.0)
    state = _decoding(limits, 8, 900)
    run_step(state)
    state.requests[RequestId("p0")].num_computed_tokens = 400
    assert _prompts(must_plan(state))["p0"][1] == int((100 - 12 - 8 * 2 * POSITION) / 5)


def test_the_pace_of_the_machine_shrinks_a_bound_in_real_time() -> None:
    """Steps that take twice what the curve says leave room for half of the work."""
    state = _decoding(_limits(bound=60.0), 2)
    _slowed(state, run_step(state)[0], 2.0)
    assert state.pace.decode == pytest.approx(2.0, rel=1e-3)
    assert step_bound(state, StepLoad(CURVE, 2)) == pytest.approx(30.0, rel=1e-3)
    state.limits = _limits()
    # The derived one grows with what steps take.
    derived = step_bound(state, StepLoad(CURVE, 2))
    assert derived == pytest.approx(6 * (BASE + 2 * ROW), rel=1e-3)


def test_prompts_that_are_faster_than_the_curve_says_get_more() -> None:
    """As where their price behind a context was guessed: the bound in real time is the same."""
    state = _decoding(_limits(bound=60.0), 2, 900)
    batch, _ = run_step(state)
    assert sum(num for _, num in _prompts(batch).values()) == 53
    _slowed(state, batch, 0.5)
    assert state.pace.decode == 1.0
    assert state.pace.mixed == pytest.approx(0.5, rel=1e-3)
    assert step_bound(state, StepLoad(CURVE, 2)) == pytest.approx(120.0, rel=1e-3)
    state.limits = _limits()
    expected = max(4 * (BASE + ROW) / 0.5, BASE + 66 * ROW)
    assert step_bound(state, StepLoad(CURVE, 2)) == pytest.approx(expected, rel=1e-3)


def test_prompts_that_are_slower_than_the_curve_says_still_go_on() -> None:
    """A tenth of what decoding takes is always theirs."""
    state = _decoding(_limits(bound=30.0), 40, 900)
    _slowed(state, run_step(state)[0], 9.0)
    assert _prompts(must_plan(state))["p0"][1] == 4


def test_one_late_step_hardly_moves_the_pace() -> None:
    """A pause of the machine is not its speed; steps without a prediction say nothing."""
    state = _decoding(_limits(bound=60.0), 2)
    batch = must_plan(state)
    record_step_seconds(state, batch, 1000 * batch.predicted_seconds)
    assert state.pace.decode <= 1.05
    record_step_seconds(state, dataclasses.replace(batch, predicted_seconds=0.0), 9.0)
    assert state.pace.decode <= 1.05
