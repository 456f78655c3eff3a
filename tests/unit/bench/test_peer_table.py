"""The peer benchmark's arithmetic and table: who is ahead must never come out turned round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.peers.build import with_barrier
from tests.bench.peers.figures import figures
from tests.bench.peers.load_llama import arrivals_of
from tests.bench.peers.prompts import Load, short_text
from tests.bench.peers.publish import DECODE, SERVING, curves, publish, slug
from tests.bench.peers.table import Row, markdown, number, plain, worst_fall


def rate_row(
    ours: tuple[float, ...],
    theirs: tuple[float, ...],
    group: str = SERVING,
    label: str = "4 streams",
) -> Row:
    return Row(group, label, "peer", "tok/s", ours, theirs, floor=2.0, goal=3.0)


def test_rates_compare_medians_and_most() -> None:
    row = rate_row((300.0, 100.0, 200.0), (50.0, 400.0, 100.0))
    assert row.medians == (200.0, 100.0)
    assert row.ratio == 2.0
    assert row.bests == (300.0, 400.0)
    assert row.ratio_of_bests == 0.75


def test_times_compare_the_other_way_round() -> None:
    row = Row("g", "128", "peer", "ms", (50.0, 40.0, 60.0), (100.0, 80.0, 90.0), False)
    assert row.ratio == 90.0 / 50.0
    assert row.bests == (40.0, 80.0)
    assert row.ratio_of_bests == 2.0


@pytest.mark.parametrize(
    ("ours", "said"), [(199.0, "below floor"), (200.0, "floor met"), (300.0, "goal met")]
)
def test_floor_and_goal(ours: float, said: str) -> None:
    assert rate_row((ours,), (100.0,)).verdict == f"2x / 3x: {said}"


def test_no_aim_no_verdict() -> None:
    assert Row("g", "l", "p", "ms", (1.0,), (1.0,)).verdict == ""


def test_a_row_needs_pairs() -> None:
    with pytest.raises(ValueError, match="pairs"):
        rate_row((1.0, 2.0), (1.0,))
    with pytest.raises(ValueError, match="pairs"):
        rate_row((), ())


def test_json_round_trip() -> None:
    row = rate_row((1.0, 2.0), (3.0, 4.0))
    assert Row.from_json(row.to_json()) == row


def test_both_tables_show_every_raw_value() -> None:
    rows = [rate_row((211.0, 223.0), (101.0, 103.0)), rate_row((1.5,), (1.25,), DECODE)]
    for text in (markdown(rows), plain(rows)):
        for shown in ("211 223", "101 103", "1.50", "1.25", SERVING, DECODE, "floor met"):
            assert shown in text
    heads = [line for line in markdown(rows).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in heads}) == 1


def test_worst_fall() -> None:
    assert worst_fall([1.0, 2.0, 2.0, 3.0]) == 0.0
    assert worst_fall([1.0, 2.0, 1.5, 1.4]) == 0.25
    assert worst_fall([1.0]) == 0.0


def test_numbers_keep_three_digits() -> None:
    assert [number(v) for v in (1234.4, 99.96, 12.34, 1.234)] == ["1234", "100.0", "12.3", "1.23"]


def test_figures_of_a_round() -> None:
    streams = [[(1.0, 1), (2.0, 1), (3.0, 2)], [(2.0, 1), (4.0, 1)]]
    found = figures(0.0, streams, 10, 0)
    assert found.tokens_per_second == 6 / 4
    assert found.decode_tokens_per_second == 3 / 2  # what came after both had begun
    assert found.ttft_ms == 1500.0
    assert found.itl_ms == 1000.0


def test_held_back_tokens_come_with_the_last_event() -> None:
    assert arrivals_of([1.0, 2.0, 3.0], 2, 2) == [(1.0, 1), (2.0, 1)]
    assert arrivals_of([1.0, 2.0], 5, 5) == [(1.0, 1), (2.0, 4)]
    with pytest.raises(RuntimeError, match="wanted 3"):
        arrivals_of([1.0], 1, 3)


def test_prompts_differ_from_the_first_words_on() -> None:
    texts = {short_text(f"Round {r} of 16", i)[:20] for r in range(3) for i in range(16)}
    assert len(texts) == 48
    load = Load(((1, 2), (3,)), 7)
    assert Load.from_json(load.to_json()) == load


def test_the_barrier_comes_once_and_only_where_expected() -> None:
    source = "    x;\n    _tile_loadconfig(&tc);\n"
    patched = with_barrier(source)
    assert patched.index("memory") < patched.index("_tile_loadconfig")
    assert with_barrier(patched) == patched
    with pytest.raises(ValueError, match="tile configuration"):
        with_barrier("nothing")


def test_curves_of_the_picture() -> None:
    rows = [rate_row((2.0,), (1.0,)), rate_row((3.0,), (1.5,), DECODE, "16 streams")]
    assert curves(rows) == {
        "isobatch": {4: (2.0,)},
        "peer": {4: (1.0,)},
        "isobatch, decode only": {16: (3.0,)},
        "peer, decode only": {16: (1.5,)},
    }
    assert slug("AMD EPYC (7R13) @ 2 GHz") == "amd-epyc-7r13-2-ghz"


def report(processor: str, date: str, ours: float) -> dict[str, Any]:
    row = rate_row((ours,), (100.0,))
    return {
        "date": date,
        "machine": {"processor": processor, "cores": 2, "system": "Linux"},
        "model": "model.gguf",
        "versions": {"isobatch": "commit abc"},
        "settings": {"rounds": 1, "threads": 2, "tokens": 8},
        "notes": ["a note"],
        "rows": [row.to_json()],
    }


def test_a_machine_more_leaves_the_others(tmp_path: Path) -> None:
    publish(report("First CPU", "2026-01-01 00:00 UTC", 150.0), tmp_path)
    publish(report("Second CPU", "2026-02-01 00:00 UTC", 250.0), tmp_path)
    publish(report("First CPU", "2026-03-01 00:00 UTC", 350.0), tmp_path)
    text = (tmp_path / "peers.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## First CPU", "## Second CPU"]
    assert "**3.50x**" in text
    assert "**2.50x**" in text
    assert "**1.50x**" not in text
    for name in ("first-cpu", "second-cpu"):
        assert (tmp_path / "images" / f"peers-{name}.svg").stat().st_size > 1000
        assert f"(images/peers-{name}.svg)" in text
