"""The emulation itself: what each simdgroup, matrix and number operation must give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.metal_on_cpu.harness.compiler import CompileOptions
from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.launcher import LaunchOptions, LaunchStats


def run(
    source: str,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    outputs: Mapping[str, tuple[tuple[int, ...], Any]],
    grid: int = 32,
    threads: int = 32,
    header: str = "",
    factory: EmulatedKernelFactory | None = None,
    template: list[tuple[str, Any]] | None = None,
) -> tuple[list[np.ndarray[Any, Any]], LaunchStats]:
    kernel = (factory or EmulatedKernelFactory())(
        name="probe",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
    )
    arrays = kernel(
        inputs=list(inputs.values()),
        template=template,
        grid=(grid, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    return arrays, kernel.stats


LANES = np.random.default_rng(0).standard_normal(32).astype(np.float32)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_max(v)", np.full(32, LANES.max())),
        ("simd_min(v)", np.full(32, LANES.min())),
        ("float(simd_sum(int(l)))", np.full(32, 496)),
        ("float(simd_prefix_exclusive_sum(int(l)))", np.cumsum(np.arange(32)) - np.arange(32)),
        ("simd_shuffle_xor(v, ushort(5))", LANES[np.arange(32) ^ 5]),
        ("simd_broadcast(v, ushort(7))", np.full(32, LANES[7])),
        ("simd_shuffle(v, ushort(31 - l))", LANES[::-1]),
        ("simd_shuffle_and_fill_down(v, 2.0f * v, ushort(3))", np.r_[LANES[3:], 2 * LANES[:3]]),
        ("quad_max(v)", LANES.reshape(8, 4).max(axis=1).repeat(4)),
        ("float(simd_any(l == 9))", np.ones(32)),
        ("float(simd_all(l != 9))", np.zeros(32)),
        ("float4(v, float2(1, 2), 3).zyx.x + float4(v).w", LANES + 2),
        ("float(as_type<half2>(0x3c004000u).y)", np.ones(32)),
        ("float(bfloat(v * 0.0f + 1.00390625f))", np.ones(32)),  # a tie, to even
    ],
)
def test_lanes(expression: str, expected: np.ndarray[Any, Any]) -> None:
    """Simdgroup operations, vectors and types by value."""
    source = f"uint l = thread_index_in_simdgroup; float v = a[l]; o[l] = {expression};"
    (got,), _ = run(source, {"a": LANES}, {"o": ((32,), np.float32)})
    assert (got == expected.astype(np.float32)).all()


def test_shuffle_from_a_missing_lane_is_poison() -> None:
    """Metal leaves it undefined, so nothing sensible may come out."""
    source = "uint l = thread_index_in_simdgroup; o[l] = simd_shuffle_down(a[l], ushort(3));"
    (got,), _ = run(source, {"a": LANES}, {"o": ((32,), np.float32)})
    assert (got[:29] == LANES[3:]).all()
    assert (got[29:].view(np.uint32) == 0xEBEBEBEB).all()


def test_sum_orders_differ_and_keep_integers() -> None:
    """Four orders of a float sum: integers agree, general values do not in some pair."""
    source = "uint l = thread_index_in_simdgroup; o[l] = simd_sum(a[l]); p[l] = simd_sum(int(l));"
    results = []
    for order in range(4):
        factory = EmulatedKernelFactory(launch_options=LaunchOptions(sum_order=order))
        outputs = {"o": ((32,), np.float32), "p": ((32,), np.int32)}
        (got, integers), _ = run(source, {"a": LANES * 1e3 + 1 / 3}, outputs, factory=factory)
        results.append(got[0])
        assert (integers == 496).all()
    assert len(set(map(float, results))) > 1


@pytest.mark.parametrize("transpose", [False, True])
def test_matrices(transpose: bool) -> None:
    """8x8 products of half matrices, loads by rows and by columns, and the layout of elements."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-9, 9, (2, 8, 8)).astype(np.float16)
    source = f"""
      simdgroup_matrix<half, 8, 8> x, y;
      simdgroup_load(x, a, 8);
      simdgroup_load(y, b, 8, ulong2(0, 0), {str(transpose).lower()});
      simdgroup_matrix<float, 8, 8> z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
      simdgroup_multiply_accumulate(z, x, y, z);
      simdgroup_store(z, o, 8);
      uint l = thread_index_in_simdgroup;
      p[2 * l] = z.thread_elements()[0];
      p[2 * l + 1] = z.thread_elements()[1];
    """
    outputs = {"o": ((8, 8), np.float32), "p": ((32, 2), np.float32)}
    (got, elements), _ = run(source, {"a": a, "b": b}, outputs)
    expected = a.astype(np.float32) @ (b.T if transpose else b).astype(np.float32) + 1
    assert (got == expected).all()
    lane = np.arange(32)
    row = (lane >> 4 & 1) * 4 + (lane >> 1 & 3)
    column = (lane >> 3 & 1) * 4 + (lane & 1) * 2
    assert (elements == np.stack([expected[row, column], expected[row, column + 1]], axis=1)).all()


def test_groups_at_the_edge_are_partial() -> None:
    """The grid counts threads, so the last group is smaller and knows it."""
    source = "uint i = thread_position_in_grid.x; o[i] = a[i] + threads_per_threadgroup.x;"
    (got,), stats = run(source, {"a": np.zeros(70, np.int32)}, {"o": ((70,), np.int32)}, 70)
    assert got[31] == 32
    assert got[64] == 6
    assert stats.threads_per_group == 32


def test_barriers_and_threadgroup_memory() -> None:
    """Values cross simdgroups after a barrier; the arena's size is counted."""
    source = """
      threadgroup float shared[64], more[2][8];
      uint l = thread_index_in_threadgroup;
      shared[l] = a[l];
      more[l % 2][l / 8] = 0.0f;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      o[l] = shared[63 - l];
    """
    a = np.arange(64, dtype=np.float32)
    (got,), stats = run(source, {"a": a}, {"o": ((64,), np.float32)}, 64, 64)
    assert (got == a[::-1]).all()
    assert (stats.barriers, stats.threadgroup_bytes) == (1, 64 * 4 + 2 * 8 * 4)


def test_threadgroup_atomics() -> None:
    """Sums by atomics are complete."""
    source = """
      threadgroup atomic_uint sum[1];
      uint l = thread_index_in_threadgroup;
      if (l == 0) atomic_store_explicit(&sum[0], 0u, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      atomic_fetch_add_explicit(&sum[0], a[l], memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      o[l] = atomic_load_explicit(&sum[0], memory_order_relaxed);
    """
    (got,), _ = run(
        source, {"a": np.arange(96, dtype=np.uint32)}, {"o": ((96,), np.uint32)}, 96, 96
    )
    assert (got == 95 * 48).all()


def test_contraction_and_the_pragma() -> None:
    """Under contract=fast a*b+c is fused, as on Apple's GPUs; the pragma stops it."""
    x = np.random.default_rng(2).standard_normal((3, 256)).astype(np.float32)
    twice = x[0] * x[1] + x[2]
    source = "uint i = thread_position_in_grid.x; o[i] = a[i] * b[i] + c[i];"
    factory = EmulatedKernelFactory(CompileOptions(contract="fast"))
    inputs = {"a": x[0], "b": x[1], "c": x[2]}
    results = {}
    for header in ("", "#pragma METAL fp contract(off)\n"):
        (results[header],), _ = run(
            source, inputs, {"o": ((256,), np.float32)}, 256, header=header, factory=factory
        )
    assert (results[""] != twice).any()
    assert (results["#pragma METAL fp contract(off)\n"] == twice).all()


def test_subnormals_can_be_flushed() -> None:
    """flush_subnormals touches float and leaves half alone, as measured on Apple's GPUs."""
    a = np.array([1e-40, 1e-38, 1.0, 2e-45] * 8, np.float32)
    h = (np.arange(32) * 6e-8).astype(np.float16)
    source = (
        "uint i = thread_position_in_grid.x; o[i] = a[i] * a[2]; p[i] = half(float(h[i]) * a[2]);"
    )
    outputs = {"o": ((32,), np.float32), "p": ((32,), np.float16)}
    (kept, _), _ = run(source, {"a": a, "h": h}, outputs)
    factory = EmulatedKernelFactory(launch_options=LaunchOptions(flush_subnormals=True))
    (flushed, halves), _ = run(source, {"a": a, "h": h}, outputs, factory=factory)
    assert (kept == a).all()
    assert (flushed == np.where(a < np.float32(2.0**-126), 0, a)).all()
    assert (halves == h).all()


def test_literals_without_suffix_are_float() -> None:
    """As in Metal: 0.1 is a float. Strict compiling refuses it, as the project's rule does."""
    source = "uint i = thread_position_in_grid.x; o[i] = a[i] * 0.1;"
    factory = EmulatedKernelFactory(CompileOptions(strict=False))
    (got,), _ = run(source, {"a": LANES}, {"o": ((32,), np.float32)}, factory=factory)
    with pytest.raises(MetalError, match="precision"):
        run(source, {"a": LANES}, {"o": ((32,), np.float32)})
    assert (got == LANES * np.float32(0.1)).all()


def test_text_is_mlx_own() -> None:
    """Small inputs come in another address space, shapes appear when named, templates are typed."""
    kernel = EmulatedKernelFactory()(
        name="probe",
        input_names=["a", "b"],
        output_names=["o"],
        source="uint i = thread_position_in_grid.x; o[i] = T(a[i]) * T(N) + b[0] + a_shape[0];",
    )
    small, large = np.zeros(3, np.float32), np.ones(32, np.float16)
    text, signature = kernel.text([large, small], [("T", np.float32), ("N", 3)], [np.float32])
    assert "template <typename T, int N>" in text
    assert "const device float16_t* a [[buffer(0)]]" in text
    assert "const constant float* b [[buffer(2)]]" in text
    assert [p.name for p in signature.parameters] == [
        "a",
        "a_shape",
        "b",
        "o",
        "thread_position_in_grid",
    ]


def test_newer_cpp_is_refused() -> None:
    """MSL 3.1 is C++14."""
    with pytest.raises(MetalError, match="incompatible with"):
        run("if constexpr (true) o[0] = a[0];", {"a": LANES}, {"o": ((32,), np.float32)})


def test_only_safe_math_is_accepted() -> None:
    """Other modes may reorder arithmetic."""
    with pytest.raises(MetalError, match="math_mode must be safe"):
        EmulatedKernelFactory()(
            name="probe",
            input_names=["a"],
            output_names=["o"],
            source="",
            compile_options={"math_mode": "fast"},
        )


def test_threadgroup_declarations_are_understood_or_refused() -> None:
    """One that is not understood must not turn into a private array in silence."""
    with pytest.raises(MetalError, match="threadgroup declaration not understood"):
        run("threadgroup float x = 1.0f; o[0] = x;", {"a": LANES}, {"o": ((32,), np.float32)})
