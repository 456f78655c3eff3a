"""What the report of `isobatch lab article` says for known results."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from scheduler_service.lab.acceptance import Acceptance, accepted_tokens
from scheduler_service.lab.article import (
    MODES,
    Divergence,
    Plan,
    Plans,
    Speed,
    Switch,
    TopTwo,
    VerifyCase,
    by_policy,
    compare,
    is_slow,
    pays_from,
)
from scheduler_service.lab.bench_executor import Outcome
from scheduler_service.lab.line_plot import line_plot
from scheduler_service.lab.report import Report, as_html, as_json, as_text

SPEED = Speed(
    (1, 2, 8),
    dict(zip(MODES, ((10.0, 10.0, 10.0), (4.0, 12.0, 30.0), (10.0, 11.0, 12.0),
                     (10.0, 11.0, 30.0), (5.0, 5.0, 5.0), (20.0, 40.0, 80.0)), strict=True)),
)  # fmt: skip
REPORT = Report(
    model="m<1>",
    weights_digest="ab" * 32,
    device="a machine",
    numeric_classes={"gemv": "F1-gemv", "threshold": "F1-threshold4", "exact": "X1"},
    threshold_rows=4,
    plan=Plan(),
    speed=SPEED,
    switch=Switch(2, {"threshold": 5, "exact": None},
                  {"threshold": ("gemv", "gemm"), "exact": ("gemv", "gemv")}, (4, 5)),
    divergences=(
        Divergence("threshold", 0, 128, 1, 37, TopTwo((3, 4), (1.5, 1.25)),
                   TopTwo((4, 3), (1.5, 1.375))),
        Divergence("exact", 0, 128, None, None, None, None),
    ),
    verify_cases=(VerifyCase("threshold", 124, 4, 4, 8, 8),
                  VerifyCase("exact", 124, 0, None, 0, 8)),
    acceptances=(Acceptance("threshold", 8, 128, 200, 66, 210, 78, 3),
                 Acceptance("exact", 8, 128, 0, 0, 0, 0, 0)),
)  # fmt: skip


def _outcome(token: int, digest: bytes) -> Outcome:
    return Outcome(token, digest, (token, 9), (2.0, 1.0))


@pytest.mark.parametrize(
    ("gemm", "gemv", "expected"),
    [
        ((4.0, 12.0, 30.0), (10.0, 11.0, 12.0), 2),
        ((11.0, 12.0, 30.0), (10.0, 11.0, 12.0), 1),
        ((11.0, 10.0, 30.0), (10.0, 11.0, 12.0), 8),  # a win below a loss does not count
        ((1.0, 1.0, 1.0), (10.0, 11.0, 12.0), None),
    ],
)
def test_pays_from(gemm: Any, gemv: Any, expected: int | None) -> None:
    speed = Speed((1, 2, 8), {"batched GEMM": gemm, "batched row-by-row GEMV": gemv})
    assert pays_from(speed) == expected


def test_compare_finds_the_first_differences() -> None:
    alone = [_outcome(1, b"a"), _outcome(2, b"b"), _outcome(3, b"c"), _outcome(4, b"d")]
    together = [alone[0], _outcome(2, b"x"), _outcome(3, b"y"), _outcome(5, b"z")]
    found = compare("gemv", 7, alone, together)
    assert (found.text_index, found.first_digest, found.first_token) == (7, 1, 3)
    assert found.alone == TopTwo((4, 9), (2.0, 1.0))
    assert found.together == TopTwo((5, 9), (2.0, 1.0))
    same = compare("gemv", 0, alone, alone)
    assert (same.first_digest, same.first_token, same.alone) == (None, None, None)


def test_the_text_has_ratios_and_places() -> None:
    text = as_text(REPORT)
    assert re.search(
        r"^ +8 +10 +30 +12 +30 +5 +80 +3.00 +1.20 +3.00 +0.50 +8.00$", text, re.MULTILINE
    )
    assert re.search(r"^ *threshold +5 +gemv to 4, gemm to 5$", text, re.MULTILINE)
    assert "from this many rows on: 2." in text
    assert re.search(r"threshold +128 +1 of 1 +1 of 1 +1 +37$", text, re.MULTILINE)
    assert re.search(r"exact +128 +0 of 1 +0 of 1 +- +-$", text, re.MULTILINE)
    assert "3 (1.5000), 4 (1.2500)" in text
    assert re.search(r"exact +0 +not told +0 of 8$", text, re.MULTILINE)
    assert re.search(r"66 of 200 \(33.0%\) +78 of 210 \(37.1%\) +3 of 8$", text, re.MULTILINE)
    assert re.search(r"exact +128 +0 of 0 +0 of 0 +0 of 8$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("drafts", "greedy", "emitted"),
    [
        ((), (5,), [5]),
        ((5, 6), (5, 6, 7), [5, 6, 7]),
        ((5, 6), (5, 9, 7), [5, 9]),
        ((5, 6), (4, 6, 7), [4]),
    ],
)
def test_a_verify_row_emits_the_right_drafts_and_one_more(
    drafts: tuple[int, ...], greedy: tuple[int, ...], emitted: list[int]
) -> None:
    assert accepted_tokens(drafts, greedy) == emitted


def test_the_page_is_whole_and_escaped() -> None:
    page = as_html(REPORT)
    assert "m&lt;1&gt;" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert page.count("<table>") == 6
    ElementTree.fromstring(
        page.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', "")
    )


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_experiment_runs_under_each_policy_in_order(at_once: bool) -> None:
    running = most = 0

    async def experiment(benches: Any) -> list[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return list(benches)

    benches: Any = {"gemv": None, "exact": None}
    assert await by_policy(benches, experiment, at_once=at_once) == ["gemv", "exact"]
    assert most == (2 if at_once else 1)


def test_a_slow_policy_gets_a_smaller_plan_of_the_same_rows() -> None:
    plans = Plans(Plan(), frozenset({"mlx"}))
    slow = plans.of("mlx")
    assert plans.of("exact") == Plan()
    assert (slow.rounds, slow.texts, slow.story_tokens) == (1, 2, 8)
    assert (slow.neighbours, slow.concurrency) == (Plan().neighbours, Plan().concurrency)
    assert is_slow("F1-mlx-0.32.4-cpu-a16f-kvf16-rope0")
    assert not is_slow("F1-mlx-0.32.4-cuda-a16f-kvf16-rope0")
    assert not is_slow("X1.1-a12-kvf16-rope0")


def test_json_holds_every_value() -> None:
    values = json.loads(json.dumps(as_json(REPORT)))
    assert values["divergences"][0]["first_token"] == 37
    assert values["speed"]["tokens_per_second"]["exact"] == [20.0, 40.0, 80.0]
    assert values["switch"]["differs_from_rows"] == {"threshold": 5, "exact": None}


def test_a_plot_puts_larger_values_higher_and_ends_at_its_frame() -> None:
    svg = line_plot((1, 2, 3), {"a": (0.0, 5.0, 10.0)}, x_label="x", y_label="y & z")
    root = ElementTree.fromstring(svg)
    line = root.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    points = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
    assert points == [(64.0, 312.0), (247.0, 164.0), (430.0, 16.0)]


def test_a_plot_of_zeros_is_a_plot() -> None:
    assert "polyline" in line_plot((1,), {"a": (0.0,)}, x_label="x", y_label="y")
