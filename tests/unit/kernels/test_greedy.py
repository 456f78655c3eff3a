"""Greedy passes in one call give what a step for each pass gives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.greedy import GreedyRow, draft_by_steps, greedy_passes
from isobatch_kernels.self_test import tiny_program
from tests.support.kernel_programs import UNITS, make_backend

PROGRAM = tiny_program(np.random.default_rng(7))
VOCAB_SIZE = PROGRAM.dimensions.vocab_size


def rows(rng: random.Random, count: int, **changes: Any) -> list[GreedyRow]:
    """Rows of 1 to 40 tokens that ask for 0 to 8 drafts."""
    return [
        replace(
            GreedyRow(
                [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 41))],
                start_position=0,
                max_drafts=rng.randrange(9),
                min_confidence=rng.choice((0.0, 1e-9, 1e-6)),
            ),
            **changes,
        )
        for _ in range(count)
    ]


def tables(count: int) -> Any:
    """Blocks of each row: four of its own."""
    return np.arange(4 * count, dtype=np.int32).reshape(count, 4)


@pytest.mark.parametrize("unit", UNITS)
def test_the_same_drafts_confidences_and_cache(unit: str) -> None:
    rng = random.Random(5)
    native, stepped = (make_backend(PROGRAM, unit, threads=2) for _ in range(2))
    lengths: set[int] = set()
    for _ in range(12):
        count = rng.randrange(1, 6)
        seed, num_ids = rng.random(), rng.choice((VOCAB_SIZE, VOCAB_SIZE // 2))
        one, other = (rows(random.Random(seed), count) for _ in range(2))
        _, passes = greedy_passes(native)(one, tables(count), num_ids)
        _, steps = draft_by_steps(stepped, other, tables(count), num_ids)
        assert passes == steps
        for a, b in zip(one, other, strict=True):
            assert (list(a.drafts), list(a.confidences)) == (list(b.drafts), list(b.confidences))
            assert (a.num_passes, a.is_finite) == (b.num_passes, b.is_finite)
            assert all(token < num_ids for token in a.drafts)
            assert len(a.drafts) <= a.max_drafts
            lengths.add(len(a.drafts))
        for block in range(4 * count):
            assert (native.read_block(block) == stepped.read_block(block)).all()
    assert len(lengths) > 3


def test_a_malformed_row_is_refused_before_anything_is_computed() -> None:
    backend = make_backend(PROGRAM, UNITS[0])
    draft = greedy_passes(backend)
    malformed: list[dict[str, Any]] = [
        {"token_ids": []},
        {"token_ids": [VOCAB_SIZE]},
        {"start_position": -1},
        {"start_position": 64},
    ]
    for changes in malformed:
        (row,) = rows(random.Random(1), 1, **changes)
        with pytest.raises(ValueError, match="got"):
            draft([row], tables(1), VOCAB_SIZE)
        assert row.num_passes == 0
    with pytest.raises(ValueError, match="block_tables"):
        draft(rows(random.Random(1), 2), tables(1), VOCAB_SIZE)


def test_a_row_that_runs_out_of_blocks_is_refused_in_its_pass() -> None:
    """Nothing is written outside of the blocks that a row was given."""
    backend = make_backend(PROGRAM, UNITS[0])
    row = GreedyRow([3] * 60, 0, 8)
    with pytest.raises(ValueError, match="block_tables"):
        greedy_passes(backend)([row], tables(1), VOCAB_SIZE)
