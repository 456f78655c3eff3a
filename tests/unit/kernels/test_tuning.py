"""Choices of speed: which there are, and that no bit depends on them."""

from __future__ import annotations

import numpy as np
import pytest

from isobatch_kernels.cpu_tuning import PANELS
from isobatch_kernels.metal.linear import LinearProfile
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.tuning import Tunable, choice_for
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
BLOCKS = tuple(range(5, 40))
ROWS = (1, 5, 9, 13, 15, 16, 17, 24, 32, 33, 64, 80, 129)


def test_a_choice_holds_up_to_its_bound() -> None:
    choices = {16: "b", 4: "a"}
    found = [choice_for(choices, rows) for rows in (1, 4, 5, 16, 17)]
    assert found == ["a", "a", "b", "b", None]


@pytest.mark.parametrize("unit", UNITS)
def test_no_bit_depends_on_how_many_rows_share_a_panel(unit: str) -> None:
    tokens = np.random.default_rng(3).integers(0, 1100, max(ROWS)).tolist()
    backend = make_backend(PROGRAM, unit)
    assert isinstance(backend, Tunable)
    for rows in ROWS:
        step = make_step([Row(tokens[:rows], 0, BLOCKS, tuple(range(rows)))])
        backend.choose({})
        expected = backend.run(step)
        cache = [backend.read_block(block) for block in BLOCKS[:9]]
        kept = bits(expected.logits).copy()
        for name in PANELS:
            backend.choose({2: "panel4", rows + 1: name})
            found = backend.run(step)
            assert (bits(found.logits) == kept).all(), (rows, name)
            assert (found.top_k_ids == expected.top_k_ids).all(), (rows, name)
            after = [backend.read_block(block) for block in BLOCKS[:9]]
            assert all((a == b).all() for a, b in zip(cache, after, strict=True)), (rows, name)


def test_the_choices_of_a_cpu() -> None:
    backend = make_backend(PROGRAM, UNITS[0])
    assert [list(backend.choices(rows)) for rows in (1, 4, 5, 12, 16, 32)] == [
        ["default"],
        ["default"],
        ["default", "panel4"],
        ["default", "panel4", "panel8"],
        ["default", "panel4", "panel16"],
        ["default", "panel4", "panel8", "panel16"],
    ]
    for wrong in ({4: "panel5"}, {0: "panel4"}):
        with pytest.raises(ValueError, match=r"\[cpu_tuning\]"):
            backend.choose(wrong)


def test_the_choices_of_metal() -> None:
    profile = LinearProfile()
    assert profile.choices(1) == ["gemv:1", "gemv:2", "gemv_multi:1"]
    assert profile.choices(5) == ["gemv_multi:6", "gemv_multi:3", "gemv_wide:8"]
    assert profile.choices(12) == ["gemv_multi:12", "gemv_multi:6", "gemm:32"]
    assert profile.choices(32) == ["gemm:32", "gemv_multi:16", "gemm:64"]
    assert LinearProfile(use_gemv=False, use_gemm=False).choices(16) == [
        "gemv_multi:16", "gemv_multi:8",
    ]  # fmt: skip
    tuned = profile.tuned_by({8: "gemv_multi:4", 1: "gemv_multi:1", 24: "gemm:32"})
    found = [tuned.choose(rows) for rows in (1, 2, 8, 9, 24, 25)]
    assert found == [
        ("gemv_multi", 1), ("gemv_multi", 4), ("gemv_multi", 4), ("gemm", 32), ("gemm", 32),
        ("gemm", 32),
    ]  # fmt: skip
    assert tuned.tuned_by({}) == profile
    # A kernel of one row takes no more.
    assert profile.tuned_by({1: "gemv:1"}).choose(2) == ("gemv_multi", 2)
    for wrong in ({8: "gemv:1"}, {8: "gemv_multi:5"}, {8: ""}, {0: "gemv:1"}):
        with pytest.raises(ValueError, match=r"\[metal\]"):
            profile.tuned_by(wrong)
