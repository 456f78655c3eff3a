"""What the curve expects: exact at its points, never falling, and sane where points are missing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import NO_CURVE, CostCurve, CostPoint
from scheduler_service.core.cost_curve import MAX_TABLE

DECODE = [(1, 4.0), (2, 5.0), (4, 6.0), (8, 12.0)]
PROMPT = [(16, 10.0), (64, 22.0), (128, 38.0)]


def _curve(behind: tuple[CostPoint, ...] = ()) -> CostCurve:
    decode = [CostPoint(n, n, 0, s) for n, s in DECODE]
    return CostCurve([*decode, *(CostPoint(1, n, 0, s) for n, s in PROMPT), *behind])


def test_points_are_met_exactly_and_joined_by_lines() -> None:
    """Both kinds begin with the single token."""
    curve = _curve()
    assert [curve.step_seconds(n, n) for n, _ in DECODE] == [s for _, s in DECODE]
    assert [curve.step_seconds(0, n) for n, _ in PROMPT] == [s for _, s in PROMPT]
    assert curve.step_seconds(6, 6) == 9.0
    assert curve.step_seconds(0, 1) == 4.0
    assert curve.step_seconds(0, 40) == 16.0
    assert curve.step_seconds(0, 0) == 0.0


def test_beyond_the_last_point_it_goes_on_as_steeply() -> None:
    """As over the later half of the points."""
    assert _curve().step_seconds(0, 256) == pytest.approx(38 + 128 * (38 - 10) / 112)
    assert CostCurve([CostPoint(1, 1, 0, 2.0)]).step_seconds(3, 3) == 6.0


def test_a_mixed_step_pays_for_the_logits_of_its_decode_rows() -> None:
    """As a prompt of all tokens, and what eight decode rows cost beyond eight prompt tokens."""
    of_eight = _curve().step_seconds(0, 8)
    assert of_eight == pytest.approx(4 + 7 / 15 * 6)
    assert _curve().step_seconds(8, 64) == pytest.approx(22 + 12 - of_eight)


def test_cached_positions_cost_by_kind() -> None:
    """Each pair of a token and a position before its row adds the same."""
    curve = _curve((CostPoint(1, 1, 100, 4.5), CostPoint(4, 4, 100, 8.0), CostPoint(1, 64, 50, 54)))
    position = (0.5 + 2.0) / 500
    assert curve.step_seconds(2, 2, 1000) == pytest.approx(5 + 1000 * position)
    assert curve.step_seconds(0, 16, 0, 1600) == pytest.approx(10 + 1600 * 32 / 3200)
    assert curve.marginal_seconds(1, 10) == pytest.approx(1 + 10 * position)
    assert _curve((CostPoint(1, 1, 100, 4.5),)).step_seconds(0, 16, 0, 200) == 10.4


def test_an_empty_curve_says_nothing() -> None:
    """Neither do points that make no sense."""
    nonsense = [CostPoint(0, 4, 0, 1.0), CostPoint(2, 1, 0, 1.0), CostPoint(1, 1, 0, 0.0),
                CostPoint(1, 1, 0, math.inf)]  # fmt: skip
    assert not NO_CURVE
    assert CostCurve(nonsense) == NO_CURVE
    assert NO_CURVE.step_seconds(3, 900, 5, 5) == 0.0
    assert NO_CURVE.marginal_seconds(3) == 0.0
    assert NO_CURVE.efficient_prompt_tokens(0.9) == 0


def test_the_smallest_efficient_chunk() -> None:
    """Tokens a second: 0.25, 1.6, 2.9, 3.4."""
    assert _curve().efficient_prompt_tokens(0.95) == 128
    assert _curve().efficient_prompt_tokens(0.85) == 64
    assert _curve().efficient_prompt_tokens(0.01) == 1


def test_decode_points_alone_stand_for_prompts_too() -> None:
    """As of a machine too slow to measure more."""
    curve = CostCurve([CostPoint(n, n, 0, s) for n, s in DECODE])
    assert curve.step_seconds(0, 4) == curve.step_seconds(4, 4) == 6.0


_points = st.lists(
    st.builds(
        lambda rows, each, context, seconds: CostPoint(rows, rows * each, context, seconds),
        st.integers(1, 64),
        st.sampled_from([1, 1, 16, 100]),
        st.sampled_from([0, 0, 0, 100, 2000]),
        st.floats(1e-4, 10),
    ),
    max_size=12,
)
_counts = st.integers(0, 600)


@given(points=_points, rows=_counts, more=_counts, tokens=_counts, positions=_counts, step=_counts)
def test_more_never_costs_less(
    points: list[CostPoint], rows: int, more: int, tokens: int, positions: int, step: int
) -> None:
    """Whatever was measured: in prompt tokens and positions of a step, and in its decode rows."""
    curve = CostCurve(points)
    least = curve.step_seconds(rows, rows + tokens, positions, positions)
    assert 0 <= least < math.inf
    assert curve.step_seconds(rows, rows + tokens + more, positions, positions) >= least
    assert curve.step_seconds(rows, rows + tokens, positions + step, positions + step) >= least
    assert curve.step_seconds(rows + more, rows + more) >= curve.step_seconds(rows, rows)
    assert curve.marginal_seconds(rows) >= 0


def test_what_fits_is_what_step_seconds_says() -> None:
    """The most tokens whose step is within the time, for any step they are added to."""
    curve = _curve((CostPoint(8, 8, 100, 16.0), CostPoint(1, 64, 100, 25.0)))
    for step in ((0, 0, 0, 0), (3, 3, 500, 0), (8, 40, 4000, 3000), (64, 700, 0, 10)):
        for start in (0, 900):
            whole = curve.step_seconds(step[0], step[1] + 600, step[2], step[3] + 600 * start)
            for seconds in (0.0, whole / 7, whole / 2, whole):
                fitting = [
                    more
                    for more in range(1, 601)
                    if curve.step_seconds(step[0], step[1] + more, step[2], step[3] + more * start)
                    <= seconds
                ]
                most = max(fitting, default=0)
                assert curve.num_fitting(step, start, 600, seconds) == most
                assert curve.num_fitting(step, start, 50, seconds) == min(50, most)


def test_costs_beyond_the_table_go_on() -> None:
    """A curve is looked up as far as its points reach, and interpolated where they reach far."""
    curve = CostCurve((CostPoint(1, 1, 0, 0.001), CostPoint(1, 2 * MAX_TABLE, 0, 1.001)))
    width = 2 * MAX_TABLE - 1
    for num_tokens in (1, MAX_TABLE - 1, MAX_TABLE, MAX_TABLE + 1, 2 * MAX_TABLE, 3 * MAX_TABLE):
        expected = 0.001 + (num_tokens - 1) / width
        assert curve.step_seconds(0, num_tokens) == pytest.approx(expected)
