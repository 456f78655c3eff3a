"""The words and the data of an explanation."""

from __future__ import annotations

import json
from dataclasses import replace

from scheduler_service.tracing.compare import compare
from scheduler_service.tracing.explain import plain, words
from scheduler_service.tracing.export import json_lines, perfetto
from scheduler_service.tracing.model import Trace
from scheduler_service.wire import trace as wire
from tests.support.traces import HEADER, MINE, make_trace, without_kv_digests

TOKENS = tuple(range(100, 130))
CHANGED = (*TOKENS[:23], 7, 8, 9)
CROWDED = make_trace(CHANGED, crowds={9: (126,)}, bad_logits_from=11, bad_kv_from=20)
ALONE = make_trace(TOKENS, first_step=50)


def _text(a: Trace, b: Trace) -> str:
    return "\n".join(words(a, b, compare(a, b)))


def test_the_planted_neighbour_is_named_with_step_block_and_paths() -> None:
    text = _text(CROWDED, ALONE)
    assert "Output token 23 is the first that differs: A drew 7, B drew 123." in text
    assert "A: largest logits 7 at 2.500000, 8 at -3.500000, margin 6.000000" in text
    assert "The logits differ from output token 11 on (position 22), before any token does." in text
    assert "from position 20 on: block 1 (positions 16 to 31)" in text
    assert (
        "A: written by step 10, which had 127 rows: 1 of its own and those of 1 neighbour" in text
    )
    assert f"({1:016x} with 126)" in text
    assert "B: written by step 59, which had 1 row, alone" in text
    assert "linear: A ran gemm (vnni), B ran gemv (vnni)" in text
    assert "step 10 of A had 127 rows, 126 of them of one neighbour, where the other had 1" in text
    assert "class threshold4" in text


def test_which_side_had_the_neighbour_does_not_matter() -> None:
    text = _text(ALONE, CROWDED)
    assert "step 10 of B had 127 rows" in text
    assert "A: written by step 59" in text


def test_equal_runs_say_how_much_was_compared() -> None:
    same = make_trace(TOKENS, crowds={9: (126,)})
    assert _text(same, ALONE).splitlines() == [
        "Equal: 30 tokens, 30 rows of logits, 41 positions of keys and values.",
        "Positions that other kernel paths wrote: 1. Every bit of them is the same.",
    ]


def test_other_classes_are_said_first() -> None:
    other = replace(ALONE, header=replace(HEADER, numeric_class="X1"))
    assert _text(CROWDED, other).startswith("The numeric classes differ: A threshold4, B X1.")


def test_between_two_classes_nothing_is_a_fault_or_a_suspect() -> None:
    """Other bits are what another class is; nobody is asked to report them."""
    for side in (CROWDED, make_trace(TOKENS, bad_kv_from=20, bad_logits_from=9)):
        exact = replace(side, header=replace(HEADER, numeric_class="X1.1-a12-kvf16"))
        for a, b in ((exact, ALONE), (ALONE, exact)):
            text = _text(a, b)
            assert "from position 20 on: block 1" in text
            assert text.endswith("Two classes are two kinds of arithmetic; no kernel is at fault.")
            assert "please report" not in text
            bare = _text(without_kv_digests(a), without_kv_digests(b))
            assert "suspect" not in bare
            assert "please report" not in bare


def test_without_digests_of_the_cache_a_suspect_is_named_as_one() -> None:
    text = _text(without_kv_digests(CROWDED), without_kv_digests(ALONE))
    assert "--trace-kv" in text
    assert (
        "The first position that other kernel paths wrote is 20, one of 1; it is the suspect"
        in text
    )
    assert "A: written by step 10" in text


def test_an_equal_cache_leaves_what_follows_the_last_layer() -> None:
    a = make_trace(TOKENS, bad_logits_from=4)
    step = a.steps[4]
    head = tuple(
        replace(each, path="gemm") if each.op == "linear" and each.dispatches == 1 else each
        for each in step.kernel_paths
    )
    steps = (*a.steps[:4], replace(step, kernel_paths=head, num_wanted=9), *a.steps[5:])
    text = _text(replace(a, steps=steps), make_trace(TOKENS))
    assert "are equal, so it happened after the last layer's cache" in text
    assert "A: step 5 had 1 row, 9 wanted positions and 0 neighbours" in text
    assert "linear: A ran gemv (vnni) x 8, gemm (vnni) x 1, B ran gemv (vnni) x 8, gemv" in text


def test_equal_paths_with_other_bits_are_a_fault_or_a_choice_behind_a_name() -> None:
    faulty = make_trace(TOKENS, bad_kv_from=20, bad_logits_from=9)
    assert "please report it" in _text(faulty, ALONE)
    # A crowd below the threshold: the path is the same, the number of rows is not.
    crowded = make_trace(TOKENS, bad_kv_from=20, bad_logits_from=9, crowds={9: (2,)})
    text = _text(crowded, ALONE)
    assert "the number of rows (3 in A, 1 in B) may choose other kernels behind a name" in text
    exact = [replace(each, header=replace(HEADER, numeric_class="X1")) for each in (crowded, ALONE)]
    assert "please report it" in _text(*exact)


def test_in_an_exact_class_other_kernels_are_no_excuse() -> None:
    sides = [replace(each, header=replace(HEADER, numeric_class="X1")) for each in (CROWDED, ALONE)]
    text = _text(*sides)
    assert "linear took other kernels there, which must not matter in an exact class" in text
    # Nor with as many rows on both sides.
    other = make_trace(TOKENS, threshold=0, bad_kv_from=20, bad_logits_from=9)
    assert _text(other, ALONE).endswith("So the runs part because linear took other kernels there.")
    sides = [replace(each, header=replace(HEADER, numeric_class="X1")) for each in (other, ALONE)]
    assert "linear took other kernels there, which must not matter in an exact class" in _text(
        *sides
    )


def test_equal_tokens_from_other_logits_are_a_difference() -> None:
    lines = words(*(pair := (make_trace(TOKENS, bad_logits_from=29), ALONE)), compare(*pair))
    assert lines[0] == "The 30 tokens are equal; what they were drawn from is not."
    assert lines[1] == "The logits differ from output token 29 on (position 40)."


def test_an_end_that_came_early_is_said() -> None:
    short = make_trace(TOKENS[:20], outcome="stop")
    assert "equal until B ends, before output token 20" in _text(make_trace(TOKENS), short)


def test_the_data_names_the_same_places() -> None:
    data = json.loads(json.dumps(plain(CROWDED, ALONE, compare(CROWDED, ALONE))))
    assert data["equal"] is False
    assert data["first_token"]["index"] == 23
    assert data["first_token"]["runs"][0]["top_ids"] == [7, 8]
    assert (data["first_kv_position"], data["first_kv_block"]) == (20, 1)
    mine, other = data["written_by"]
    assert (mine["step_id"], mine["block"], mine["num_step_tokens"]) == (10, 1, 127)
    assert mine["neighbours"] == [{"sequence": f"{1:016x}", "num_tokens": 126}]
    assert (other["step_id"], other["num_neighbours"]) == (59, 0)
    equal = plain(ALONE, ALONE, compare(ALONE, ALONE))
    assert (equal["equal"], equal["written_by"], equal["first_kv_block"]) == (True, None, None)


def test_exports_hold_what_the_trace_holds() -> None:
    records = [json.loads(line) for line in json_lines(CROWDED)]
    kinds = [record["record"] for record in records]
    assert kinds == ["header", *["step"] * 26, *["kv_block"] * 3, "end"]
    tokens = [
        token for record in records if record["record"] == "step" for token in record["tokens"]
    ]
    assert [token["token_id"] for token in tokens] == list(CHANGED)
    assert tokens[-1]["running_digest"] == records[-1]["logits_digest"]
    assert tokens[2]["margin"] == 0.75
    assert records[10]["num_neighbours"] == 1
    assert records[-2]["writer_hash"] == f"{MINE:016x}"
    events = perfetto(CROWDED)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [event["args"]["step_id"] for event in spans] == list(range(1, 27))
    assert spans[9]["args"]["num_neighbours"] == 1
    names = [event["name"].partition(",")[0] for event in spans]
    assert names == ["prefill", *["decode"] * 25]
    assert all(event["dur"] == 0.9 for event in spans)


def test_a_stop_string_before_the_last_drawn_token_cuts_it_off() -> None:
    assert CROWDED.end is not None
    cut = replace(CROWDED, end=replace(CROWDED.end, num_tokens=24))
    assert len(cut.tokens) == 24
    steps = [json.loads(line) for line in json_lines(cut)][1:27]
    assert [len(step["tokens"]) for step in steps] == [1] * 24 + [0] * 2


def test_a_header_survives_being_written() -> None:
    data = wire.header(HEADER)
    assert wire.read(data).header == HEADER
    steps = b"".join(
        wire.kernel_paths(step.kernel_paths) + wire.step(step, index)
        for index, step in enumerate(CROWDED.steps)
    )
    assert CROWDED.end is not None
    trace = wire.read(data + steps + wire.end(CROWDED.end))
    assert (trace.steps, trace.end) == (CROWDED.steps, CROWDED.end)
