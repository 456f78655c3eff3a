"""The engine's results depend on a token row alone: not on unit, threads, batch or chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import StepOutput
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
BLOCKS = tuple(range(5, 40))
RESULTS = ("argmax_ids", "quantile_ids", "top_k_ids")
FLOATS = ("logits", "max_logits", "normalizers", "top_k_logits", "top_k_weights")


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1100, count)]


def same(a: StepOutput, b: StepOutput, at: int = 0, of: int = 0) -> bool:
    """Whether wanted position `at` of a is bit-equal to wanted position `of` of b."""
    equal = (bits(a.logits[at]) == bits(b.logits[of])).all()
    for name in ("argmax_ids", "quantile_ids", "max_logits", "normalizers"):
        equal = equal and getattr(a, name)[at] == getattr(b, name)[of]
    for name in ("top_k_ids", "top_k_logits", "top_k_weights"):
        one, other = (
            getattr(o, name)[o.top_k_starts[i] : o.top_k_starts[i + 1]]
            for o, i in ((a, at), (b, of))
        )
        equal = equal and bool((one == other).all())
    return bool(equal)


@pytest.fixture(scope="module")
def expected() -> tuple[StepOutput, Any]:
    """The reference's answer for 300 tokens, every 50th wanted, and its cache."""
    backend = make_backend(PROGRAM, "reference")
    wanted = tuple(range(49, 300, 50))
    output = backend.run(make_step([Row(tokens(300), 0, BLOCKS, wanted)]))
    return output, np.stack([backend.read_block(b) for b in BLOCKS])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_and_thread_count_gives_the_same_bits(
    unit: str, threads: int, expected: tuple[StepOutput, Any]
) -> None:
    """Results, statistics and cache."""
    backend = make_backend(PROGRAM, unit, threads=threads)
    output = backend.run(make_step([Row(tokens(300), 0, BLOCKS, tuple(range(49, 300, 50)))]))
    for name in FLOATS:
        assert (bits(getattr(output, name)) == bits(getattr(expected[0], name))).all(), name
    for name in RESULTS:
        assert (getattr(output, name) == getattr(expected[0], name)).all(), name
    assert (np.stack([backend.read_block(b) for b in BLOCKS]) == expected[1]).all()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 255, 256, 257])
def test_a_prompt_may_be_cut_anywhere(
    unit: str, flush: bool, chunk: int, expected: tuple[StepOutput, Any]
) -> None:
    """Chunks of any size give the last position's bits and the same cache."""
    backend = make_backend(PROGRAM, unit, threads=2)
    backend.set_flush_subnormals(flush)
    prompt = tokens(300)
    for start in range(0, 300, chunk):
        output = backend.run(make_step([Row(prompt[start : start + chunk], start, BLOCKS)]))
    assert same(output, expected[0], 0, 5)
    assert (np.stack([backend.read_block(b) for b in BLOCKS]) == expected[1]).all()


@pytest.mark.parametrize("unit", UNITS)
def test_a_row_does_not_notice_the_batch(unit: str) -> None:
    """Decode rows, a long prefill and a verify row together, each against itself alone."""
    rows = [
        Row(tokens(1, 1), 0, (0,)),
        Row(tokens(120, 2), 0, range(1, 10)),
        Row(tokens(4, 3), 0, (10,), wanted=(0, 1, 2, 3)),
        *(Row(tokens(1, 4 + i), 0, (11 + i,)) for i in range(5)),
    ]
    together = make_backend(PROGRAM, unit, threads=2).run(make_step(rows))
    at = 0
    for row in rows:
        alone = make_backend(PROGRAM, unit).run(make_step([row]))
        for i in range(len(row.wanted)):
            assert same(together, alone, at, i)
            at += 1


@pytest.mark.parametrize("unit", UNITS)
def test_garbage_in_another_row_is_its_own(unit: str) -> None:
    """A row that is not finite names its op; its neighbour has the bits it has alone."""
    program = tiny_program(np.random.default_rng(8))
    embedding = program.ops[0].weight  # type: ignore[union-attr]
    embedding.scales[5] = np.nan  # type: ignore[union-attr]
    good, bad = Row(tokens(20, 9), 0, (0, 1)), Row([1, 5, 2], 0, (2,))
    good.tokens = [t if t != 5 else 6 for t in good.tokens]
    alone = make_backend(program, unit).run(make_step([good]))
    for rows in ([good, bad], [bad, good]):
        both = make_backend(program, unit, threads=2).run(make_step(rows))
        assert same(both, alone, rows.index(good), 0)
        assert both.non_finite_ops[rows.index(good)] == -1
        assert both.non_finite_ops[rows.index(bad)] == 1  # the first norm and quantise


@pytest.mark.parametrize("unit", UNITS)
def test_a_long_context_on_many_threads(unit: str) -> None:
    """Attention by chunk equals attention by head."""
    results = []
    for threads in (1, 4):
        backend = make_backend(PROGRAM, unit, threads=threads)
        backend.run(make_step([Row(tokens(599), 0, range(40))]))
        results.append(backend.run(make_step([Row(tokens(1), 599, range(40))])))
    assert same(results[0], results[1])


def test_many_steps_on_more_threads_than_cores() -> None:
    """Barriers neither lose a wake-up nor let a thread run ahead."""
    backend = make_backend(PROGRAM, UNITS[-1], threads=6)
    step = make_step([Row(tokens(3), 0, (0,))])
    first = bits(backend.run(step).logits).copy()
    for _ in range(100):
        assert (bits(backend.run(step).logits) == first).all()
