"""Where two traces part: tokens, logits, keys and values, kernel paths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core import SamplingParams
from scheduler_service.tracing.compare import compare, obstacles, path_differences, writings
from scheduler_service.tracing.model import KvBlock, Trace
from tests.support.traces import HEADER, PROMPT, make_trace, without_kv_digests

TOKENS = tuple(range(100, 130))
# The neighbour's prompt came with output token 9: its row wrote position 12 + 9 - 1 = 20.
CROWD = {9: (126,)}


def test_a_trace_equals_itself() -> None:
    found = compare(make_trace(TOKENS), make_trace(TOKENS, first_step=70))
    assert found.is_equal
    assert (found.num_compared_tokens, found.num_compared_logits) == (30, 30)
    assert found.num_compared_positions == len(PROMPT) + 29
    assert found.num_path_differences == 0


def test_other_paths_with_equal_bits_are_equal() -> None:
    found = compare(make_trace(TOKENS, crowds=CROWD), make_trace(TOKENS))
    assert found.is_equal
    assert (found.first_paths, found.num_path_differences) == (20, 1)


def test_each_kind_of_difference_is_found_at_its_first_place() -> None:
    changed = (*TOKENS[:23], 7, 8, 9)
    a = make_trace(changed, crowds=CROWD, bad_logits_from=11, bad_kv_from=20)
    found = compare(a, make_trace(TOKENS))
    assert not found.is_equal
    assert (found.first_token, found.first_logits, found.first_kv) == (23, 11, 20)
    assert (found.first_paths, found.num_path_differences) == (20, 1)
    # Past the first differing token the runs compute different things.
    assert found.num_compared_tokens == 24
    assert found.num_compared_logits == 24


@pytest.mark.parametrize("first", [0, 1, 29])
def test_the_first_and_the_last_token_count(first: int) -> None:
    changed = tuple(1 if index == first else each for index, each in enumerate(TOKENS))
    found = compare(make_trace(changed, bad_logits_from=first), make_trace(TOKENS))
    assert (found.first_token, found.first_logits, found.first_kv) == (first, first, None)


def test_keys_and_values_after_the_differing_logits_are_not_to_blame() -> None:
    # The logits of output token 5 come from positions 0 to 16.
    a = make_trace(TOKENS, bad_logits_from=5, bad_kv_from=17)
    assert compare(a, make_trace(TOKENS)).first_kv is None
    b = make_trace(TOKENS, bad_logits_from=5, bad_kv_from=16)
    assert compare(b, make_trace(TOKENS)).first_kv == 16


def test_differing_keys_and_values_with_equal_logits_are_a_difference() -> None:
    found = compare(make_trace(TOKENS, bad_kv_from=40), make_trace(TOKENS))
    assert (found.is_equal, found.first_logits, found.first_kv) == (False, None, 40)


def test_an_answer_that_goes_on_differs_unless_the_other_was_cut_short() -> None:
    whole, short = make_trace(TOKENS), make_trace(TOKENS[:20], outcome="stop")
    assert compare(whole, short).first_token == 20
    assert compare(short, whole).first_token == 20
    assert compare(whole, make_trace(TOKENS[:20], outcome="cancelled")).is_equal
    assert compare(whole, replace(short, end=None)).is_equal


def test_without_digests_of_keys_and_values_the_paths_name_a_suspect() -> None:
    a = without_kv_digests(make_trace(TOKENS, crowds=CROWD, bad_logits_from=9))
    found = compare(a, make_trace(TOKENS))
    assert (found.first_logits, found.first_kv, found.first_paths) == (9, None, 20)
    assert not found.has_kv_digests


def test_a_request_must_be_the_same_in_all_that_decides_its_tokens() -> None:
    a = make_trace(TOKENS)
    assert obstacles(a, make_trace(TOKENS, crowds=CROWD)) == []
    other = replace(
        HEADER, weights_digest="x", numeric_class="y", stop=(), prompt_token_ids=(1,),
        sampling=SamplingParams(temperature=0.25, seed=3, top_k=7, logit_bias=((3, -1.5),)),
    )  # fmt: skip
    assert obstacles(a, replace(a, header=other)) == [
        "weights_digest", "prompt_token_ids", "stop", "sampling.temperature", "sampling.seed",
    ]  # fmt: skip
    greedy = [
        replace(a, header=replace(HEADER, sampling=SamplingParams(seed=seed))) for seed in (1, 2)
    ]
    assert obstacles(greedy[0], greedy[1]) == []


def test_the_writer_of_a_position_is_its_step_with_its_neighbours() -> None:
    writing = writings(make_trace(TOKENS, crowds={9: (126, 1)}))[20]
    assert (writing.step_id, writing.block_index, writing.num_step_tokens) == (10, 1, 128)
    assert [each.num_tokens for each in writing.neighbours] == [126, 1]
    assert not writing.is_shared


def test_a_shared_prefix_was_written_by_somebody_else() -> None:
    trace = make_trace(TOKENS)
    # Its first step computed the last four tokens of the prompt alone.
    first = replace(trace.steps[0], start_position=8, num_row_tokens=4)
    cut = replace(trace, steps=(first, *trace.steps[1:]))
    found = writings(cut)
    assert [found[position].is_shared for position in (0, 7, 8, 12)] == [True, True, False, False]


def test_a_step_that_is_no_longer_remembered_is_filled_in_from_the_requests_own() -> None:
    trace = make_trace(TOKENS)

    def forget(block: KvBlock) -> KvBlock:
        return replace(block, steps=(None,) * len(block.steps))

    forgotten = replace(trace, blocks=tuple(map(forget, trace.blocks)))
    assert [each.step_id for each in writings(forgotten).values()] == [
        each.step_id for each in writings(trace).values()
    ]
    nobody = writings(replace(forgotten, steps=trace.steps[1:]))[3]
    assert (nobody.step_id, nobody.is_shared, nobody.kernel_paths) == (None, True, ())
    assert path_differences(nobody, writings(trace)[3]) == []


def test_before_a_preemption_counts_what_was_there_then() -> None:
    trace = make_trace(TOKENS[:5])
    again = tuple(replace(each, generation=1, step_id=each.step_id + 40) for each in trace.steps)
    blocks = tuple(replace(each, generation=1, digests=(b"later",) * len(each.steps))
                   for each in trace.blocks)  # fmt: skip
    both = Trace(trace.header, trace.steps + again, blocks + trace.blocks, trace.end)
    assert writings(both) == writings(trace)


def test_a_neighbours_attention_is_no_difference() -> None:
    a, b = make_trace(TOKENS, crowds={9: (2,)}), make_trace(TOKENS)
    mixed = writings(a)[20]
    prefill = next(each for each in make_trace(TOKENS[:1]).steps[0].kernel_paths
                   if each.op == "paged_attention")  # fmt: skip
    mixed = replace(mixed, kernel_paths=(*mixed.kernel_paths, replace(prefill, dispatches=99)))
    assert path_differences(mixed, writings(b)[20]) == []
