"""The start-up check: it passes here, finds wrong bits, and takes the wrong kernel out of use."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.metal import create, exact, self_test
from isobatch_kernels.metal.arrays import KernelFactory
from isobatch_kernels.metal.create import (
    check_whole_steps,
    create_metal_backend,
    metal_is_available,
)
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.linear import LinearProfile
from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal_backend import MetalLimits
from isobatch_kernels.rope_table import build_rope_table
from isobatch_kernels.self_test import tiny_program
from tests.metal_on_cpu.backends import metal_backend, rope_table
from tests.metal_on_cpu.cases.common import assert_same_bits, quantized
from tests.metal_on_cpu.cases.linear import FORMATS, Format, make_case
from tests.metal_on_cpu.harness.arrays import NumpyArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.support.kernel_programs import Row, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
FACTORY = EmulatedKernelFactory()
FORMAT = {(4, 64, 64)}


def faulty(name: str, old: str, new: str) -> KernelFactory:
    """A factory that changes the text of one kernel."""

    def make(**description: Any) -> Any:
        if description["name"] == f"isobatch_{name}":
            for part in ("header", "source"):
                description[part] = description[part].replace(old, new)
        return FACTORY(**description)

    return make


@pytest.mark.parametrize("f", FORMATS[:9], ids=str)
def test_the_numpy_definition_equals_the_reference(f: Format) -> None:
    """The self-test's own linear layer, used where the native module is missing."""
    case = make_case(f, 40, 6, 9)
    got = exact.linear(case.weight, case.x, f.block)
    assert_same_bits(got + np.float32(0), case.plain)
    q, d = quantized(case.x, f.block)
    integers, scales = exact.quantize(case.x, f.block)
    assert (integers.reshape(q.shape) == q).all()
    assert_same_bits(scales, d)


def test_fma_rounds_once() -> None:
    """Against integers of Python, on sums that round twice would get wrong."""
    one = np.float32(1)
    tiny = np.float32(2.0**-24)
    a = np.array([1 + 2.0**-12, 1 + 2.0**-23, -1 - 2.0**-12], np.float32)
    got = exact.fma(a, a, np.array([tiny * tiny, -one, tiny * tiny], np.float32))
    from fractions import Fraction

    for i, value in enumerate(got.tolist()):
        addend = (tiny * tiny, -one, tiny * tiny)[i]
        true = Fraction(float(a[i])) ** 2 + Fraction(float(addend))
        neighbours = [np.nextafter(np.float32(value), np.float32(s)) for s in (-9, 9)]
        distance = abs(Fraction(value) - true)
        assert all(distance <= abs(Fraction(float(n)) - true) for n in neighbours)


def test_every_path_passes_here() -> None:
    """Hundreds of comparisons of three kernels for every format."""
    launcher = Launcher(FACTORY, NumpyArrays())
    results = list(self_test.compare(launcher, LinearProfile(wide_tiles=())))
    counts = Counter((4 if r.shape[0] <= 4 else 8, *r.shape[1:3]) for r in results)
    assert min(counts.values()) > 180
    assert {r.path for r in results} == {"gemv", "gemv_multi", "gemm"}
    results += self_test.compare(launcher, LinearProfile(), FORMAT)
    assert "gemv_wide" in {r.path for r in results}
    assert [r for r in results if not r.equal] == []


def test_a_wrong_kernel_is_taken_out_of_use(caplog: pytest.LogCaptureFixture) -> None:
    """Said aloud, once a kernel, and the profile takes the fallback."""
    wrong = faulty(
        "gemm", "acc[a][b][e] = fma(block, v, acc[a][b][e]);", "acc[a][b][e] += block * v;"
    )
    with caplog.at_level(logging.WARNING):
        verified = self_test.verified_profile(
            Launcher(wrong, NumpyArrays()), LinearProfile(), FORMAT
        )
    profile = verified.profile
    assert (verified.num_cases > 20, verified.refused) == (True, ("gemm",))
    assert (profile.use_gemv, profile.use_gemm) == (True, False)
    assert profile.choose(100) == ("gemv_multi", 24)
    assert ["gemm differs" in record.getMessage() for record in caplog.records] == [True]


def test_without_a_right_fallback_the_device_is_refused() -> None:
    """A sum in another order, in the kernel that everything falls back to."""
    old = "total = total + parts[i * STEP * 32 + at];"
    wrong = faulty("gemv_multi", old, "total = parts[i * STEP * 32 + at] - total;")
    with pytest.raises(RuntimeError, match="gemv_multi must equal the contract"):
        self_test.verified_profile(Launcher(wrong, NumpyArrays()), LinearProfile(), FORMAT)


def test_whole_steps_are_compared() -> None:
    """Every other kernel, by a tiny model: a prefill over the border of a chunk, then decoding."""
    factory = EmulatedKernelFactory()
    assert check_whole_steps(factory, NumpyArrays(), LinearProfile()) == (1, True)
    names = {name.removeprefix("isobatch_") for name in factory.launches}
    assert {
        *("embed", "norm_quantize", "quantize", "gate_quantize", "rope_write_kv", "gemv_multi"),
        *("attention_prefill", "attention_decode", "attention_merge"),
        *("apply_edits", "row_maximum", "chunk_sums", "quantile", "top_k"),
    } <= names


def test_a_wrong_kernel_without_a_fallback_refuses_the_device() -> None:
    """One more rounding in what the cache holds."""
    wrong = faulty("rope_write_kv", "fma(x0, s, x1 * c)", "x0 * s + x1 * c")
    with pytest.raises(RuntimeError, match="must equal the reference, got other bits"):
        check_whole_steps(wrong, NumpyArrays(), LinearProfile())


def test_wrong_attention_over_chunks_is_taken_out_of_use(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks weighted the other way: the form that walks them one by one does all the work."""
    wrong = faulty(
        "attention_merge", "l = fma(l, fa, chunk_l * fc);", "l = fma(l, fc, chunk_l * fa);"
    )
    with caplog.at_level(logging.WARNING):
        assert check_whole_steps(wrong, NumpyArrays(), LinearProfile()) == (2, False)
    assert ["attention_merge differ" in each.getMessage() for each in caplog.records] == [True]
    assert not MetalProfile(use_split=False).splits(1, 9, decodes=True)


def test_the_wired_limit_is_never_raised() -> None:
    """No module of the product names the function; raising it has made whole machines stop."""
    root = Path(__file__).parents[2]
    files = [f for part in ("kernels", "executor_service") for f in (root / part).rglob("*.py")]
    assert len(files) > 50
    assert [f.name for f in files if "set_wired_limit" in f.read_text()] == []


def test_without_the_reference_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Mac without the native module."""
    monkeypatch.setattr(create, "native_module_error", lambda: "not built")
    assert check_whole_steps(FACTORY, NumpyArrays(), LinearProfile()) == (0, True)


def test_a_model_names_its_formats() -> None:
    """Bits as stored, group, activation block."""
    assert self_test.formats_of(PROGRAM) == {(4, 32, 32), (8, 32, 32)}
    launcher = Launcher(FACTORY, NumpyArrays())
    shapes = {r.shape[:3] for r in self_test.compare(launcher, LinearProfile(), FORMAT)}
    assert shapes == FORMAT


def test_warm_up_compiles_all_and_leaves_no_trace() -> None:
    """No later step needs another variant, whatever its size; the cache is clear before."""
    factory = EmulatedKernelFactory()
    backend = metal_backend(PROGRAM, factory, max_num_seqs=40)
    backend.warm_up()
    assert not any(backend.read_block(block).any() for block in range(64))
    compiled = set(factory.texts)
    for rows in (1, 2, 3, 5, 7, 11, 15, 20, 25, 40):
        step = make_step([Row([1], 0, (i,)) for i in range(rows)])
        backend.run(step)
        sources = np.arange(rows, dtype=np.int32)
        backend.run(replace(step, token_sources=sources))
    long = tuple(range(20))
    backend.run(make_step([Row([1] * 270, 0, long), Row([2], 0, (30,))]))
    backend.run(make_step([Row([1] * 3, 270, long)]))
    backend.run(make_step([Row([1], 273, long)]))
    for rows in (1, 3, 8):
        for way in backend.choices(rows):
            backend.choose({rows: way})
            backend.run(make_step([Row([1] * rows, 274, long)]))
    backend.choose({64: "gemm:64"})
    backend.run(make_step([Row([1] * 40, 274, long)]))
    assert set(factory.texts) == compiled


def test_rope_table_is_that_of_the_cpu_backend() -> None:
    """One table for both backends."""
    table = build_rope_table(PROGRAM.rope, PROGRAM.dimensions.context_length)
    assert_same_bits(table.reshape(-1), rope_table(PROGRAM))


@pytest.mark.skipif(metal_is_available(), reason="this machine has a Metal device")
def test_without_a_device_the_error_says_so() -> None:
    """Linux: MLX is here, Metal is not."""
    with pytest.raises(RuntimeError, match="a Metal device is needed"):
        create_metal_backend(PROGRAM, MetalLimits(8, 16, 4, 64))
