"""Float policies in the engine: which kernel a step takes, and what a row's neighbours change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.float_program import apply_policy, policy_of
from isobatch_kernels.kernel_policy import POLICIES, ROW_POLICIES, KernelPolicy
from isobatch_kernels.program import Linear, Quantize
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import StepOutput
from tests.support.kernel_programs import UNITS, Row, bits, make_backend, make_step

EXACT = tiny_program(np.random.default_rng(7))


def _backend(name: str, rows: int = 4, unit: str = UNITS[0], threads: int = 2) -> Any:
    return make_backend(apply_policy(EXACT, KernelPolicy(name, rows)), unit, threads=threads)


def _rows(count: int, length: int = 1) -> list[Row]:
    rng = np.random.default_rng(5)
    return [Row([int(t) for t in rng.integers(0, 1100, length)], 0, (2 * i, 2 * i + 1))
            for i in range(count)]  # fmt: skip


def _logits(name: str, rows: Sequence[Row], **options: Any) -> np.ndarray[Any, Any]:
    return bits(_backend(name, **options).run(make_step(rows)).logits)


def _linear_paths(output: StepOutput) -> set[str]:
    return {each.path for each in output.paths if each.op == "linear"}


@pytest.mark.parametrize("name", ROW_POLICIES)
def test_every_unit_and_thread_count_gives_the_same_bits(name: str) -> None:
    rows = _rows(3, 9)
    expected = _logits(name, rows, unit="reference", threads=1)
    for unit in UNITS:
        for threads in (1, 3):
            got = _logits(name, rows, unit=unit, threads=threads)
            assert np.array_equal(got, expected), (unit, threads)


@pytest.mark.parametrize("name", ["gemv", "gemm"])
def test_one_kernel_alone_lets_no_row_notice_the_batch(name: str) -> None:
    rows = _rows(8)
    alone = np.concatenate([_logits(name, [row]) for row in rows])
    assert np.array_equal(_logits(name, rows), alone)


def test_the_kernels_give_other_bits_that_are_close() -> None:
    rows = _rows(8)
    gemv, gemm = (_logits(name, rows).view(np.float32) for name in ("gemv", "gemm"))
    assert (gemv != gemm).any()
    exact = make_backend(EXACT, UNITS[0]).run(make_step(rows)).logits
    for each in (gemv, gemm):
        np.testing.assert_allclose(each, exact, atol=0.02 * float(np.abs(exact).max()))


@pytest.mark.parametrize("threshold", [0, 1, 4, 6])
def test_threshold_switches_at_its_rows(threshold: int) -> None:
    for count in range(1, 9):
        rows = _rows(count)
        output = _backend("threshold", threshold).run(make_step(rows))
        kernel = "gemv" if count <= threshold else "gemm"
        assert _linear_paths(output) == {kernel}
        assert np.array_equal(bits(output.logits), _logits(kernel, rows)), count


def test_a_neighbour_changes_a_row_under_threshold_and_under_no_other_policy() -> None:
    rows = _rows(5)
    changed = {
        name: not np.array_equal(_logits(name, rows)[0], _logits(name, rows[:1])[0])
        for name in ("exact", *ROW_POLICIES)
    }
    assert changed == {"exact": False, "threshold": True, "gemv": False, "gemm": False}


def test_the_neighbour_reaches_the_cache_and_a_step_alone_later() -> None:
    """120 prompt tokens beside 4 decode rows: their keys and values are GEMM's, and stay."""
    prompt = [int(t) for t in np.random.default_rng(8).integers(0, 1100, 120)]
    other = Row(prompt, 0, range(20, 28))
    seen = []
    for company in ([], [other]):
        backend = _backend("threshold")
        rows = [Row([7, 8, 9, 10], 0, (0,)), *company]
        backend.run(make_step(rows))
        block = backend.read_block(0)
        later = backend.run(make_step([Row([11], 4, (0,))]))
        assert _linear_paths(later) == {"gemv"}
        seen.append((block, bits(later.logits)))
    assert not np.array_equal(seen[0][0], seen[1][0])
    assert not np.array_equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("name", ROW_POLICIES)
def test_garbage_in_another_row_is_its_own(name: str) -> None:
    program = tiny_program(np.random.default_rng(8))
    program.ops[0].weight.scales[5] = np.nan  # type: ignore[union-attr]
    floats = apply_policy(program, KernelPolicy(name))
    good, bad = Row([3, 4, 6], 0, (0,)), Row([1, 5, 2], 0, (1,))
    alone = make_backend(apply_policy(program, KernelPolicy(name)), UNITS[0])
    both = make_backend(floats, UNITS[0]).run(make_step([bad, good]))
    # Alone, the good row has three rows: below the threshold. Beside the other it has six.
    name_alone = "gemm" if name == "threshold" else name
    alone = make_backend(apply_policy(program, KernelPolicy(name_alone)), UNITS[0])
    assert np.array_equal(bits(both.logits[1]), bits(alone.run(make_step([good])).logits[0]))
    assert both.non_finite_ops[1] == -1
    first_linear = next(i for i, op in enumerate(floats.ops) if isinstance(op, Linear))
    assert both.non_finite_ops[0] == first_linear


def test_a_float_program_has_no_block_integers_and_keeps_its_names() -> None:
    named = dataclasses.replace(EXACT, names=tuple(str(i) for i in range(len(EXACT.ops))))
    program = apply_policy(named, KernelPolicy("gemv"))
    assert not any(isinstance(op, Quantize) for op in program.ops)
    assert all(buffer.activation_block == 0 for buffer in program.buffers)
    kept = [str(i) for i, op in enumerate(EXACT.ops) if not isinstance(op, Quantize)]
    assert list(program.names) == kept
    assert policy_of(program) == "gemv"
    assert apply_policy(named, KernelPolicy()) is named


def test_class_ids_are_distinct() -> None:
    policies = [KernelPolicy(name) for name in POLICIES if name != "exact"]
    policies += [KernelPolicy("threshold", rows) for rows in (0, 1, 14)]
    prefixes = [each.class_prefix() for each in policies]
    assert len(set(prefixes)) == len(prefixes)
    assert all(prefix.startswith("F1-") for prefix in prefixes)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of exact, mlx, .* got 'fast'"):
        KernelPolicy("fast")
    with pytest.raises(ValueError, match=r"threshold_rows must not be negative, got -1"):
        KernelPolicy("threshold", -1)
    with pytest.raises(ValueError, match="needs a float policy"):
        KernelPolicy().class_prefix()
    mixed = [op for op in EXACT.ops if isinstance(op, Linear)]
    mixed = [dataclasses.replace(mixed[0], policy="gemv"), *mixed[1:]]
    with pytest.raises(ValueError, match="must share one policy"):
        policy_of(dataclasses.replace(EXACT, ops=tuple(mixed)))
