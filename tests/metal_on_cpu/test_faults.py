"""Faults put into a correct tiled product on purpose: each has to be reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.metal_on_cpu.harness.compiler import CompileOptions
from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.launcher import LaunchOptions, LaunchStats

# c (64, 96) = a (64, 64) @ b (96, 64).T in tiles of 32x32 by four simdgroups.
PRODUCT = """
  constexpr int LD = 20;
  threadgroup float xs[32 * LD], ws[32 * LD];
  const int t = int(thread_index_in_threadgroup), sg = int(simdgroup_index_in_threadgroup);
  const int m0 = int(threadgroup_position_in_grid.y) * 32;
  const int n0 = int(threadgroup_position_in_grid.x) * 32;
  const int sm = sg / 2 * 16, sn = sg % 2 * 16;
  simdgroup_matrix<float, 8, 8> sum[2][2];
  for (int i = 0; i < 4; i++) sum[i / 2][i % 2] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k0 = 0; k0 < 64; k0 += 16) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = t; e < 512; e += 128) {
      xs[e / 16 * LD + e % 16] = a[(m0 + e / 16) * 64 + k0 + e % 16];
      ws[e / 16 * LD + e % 16] = b[(n0 + e / 16) * 64 + k0 + e % 16];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < 16; k += 8) {
      simdgroup_matrix<float, 8, 8> fx[2], fw[2];
      for (int i = 0; i < 2; i++) simdgroup_load(fx[i], xs + (sm + 8 * i) * LD + k, LD);
      for (int j = 0; j < 2; j++) {
        simdgroup_load(fw[j], ws + (sn + 8 * j) * LD + k, LD, ulong2(0, 0), true);
      }
      for (int i = 0; i < 4; i++) {
        simdgroup_multiply_accumulate(sum[i / 2][i % 2], fx[i / 2], fw[i % 2], sum[i / 2][i % 2]);
      }
    }
  }
  for (int i = 0; i < 4; i++) {
    simdgroup_store(sum[i / 2][i % 2], c + (m0 + sm + i / 2 * 8) * 96 + n0 + sn + i % 2 * 8, 96);
  }
"""
LOOP = "for (int k0 = 0; k0 < 64; k0 += 16) {"
FIRST = LOOP + "\n    threadgroup_barrier(mem_flags::mem_threadgroup);"
HEAD = "constexpr int LD = 20;"
MEMORY = "mem_flags::mem_threadgroup"
STORE = "* 96 + n0 + sn + i % 2 * 8, 96"
BIG = " threadgroup float big[8000]; big[thread_index_in_threadgroup] = 0;"
RACE, OUTSIDE, DIVERGENT = "data race", "out of bounds", "divergent|deadlock"


@dataclass(frozen=True)
class Fault:
    name: str
    old: str
    new: str
    message: str
    fast_mode: bool  # reported without instrumentation too


FAULTS = (
    Fault("missing barrier", FIRST, LOOP, RACE, False),
    Fault("barrier of no memory", MEMORY, "mem_flags::mem_none", RACE, False),
    Fault("barrier of other memory", MEMORY, "mem_flags::mem_device", RACE, False),
    Fault(
        "simdgroup barrier only",
        FIRST,
        FIRST.replace("threadgroup_barrier", "simdgroup_barrier"),
        RACE,
        False,
    ),
    Fault("two groups write one cell", HEAD, HEAD + " c[0] = 1;", RACE, False),
    Fault(
        "divergent barrier",
        FIRST,
        FIRST.replace("threadgroup_b", "if (sg < 3) threadgroup_b"),
        DIVERGENT,
        True,
    ),
    Fault(
        "divergent barrier in a simdgroup",
        FIRST,
        FIRST.replace("threadgroup_b", "if (t % 32 < 30) threadgroup_b"),
        DIVERGENT,
        True,
    ),
    Fault("early return", "const int sm", "if (t == 5) return; const int sm", "returned", True),
    Fault(
        "threadgroup overrun",
        "ws[e / 16 * LD + e % 16] =",
        "ws[(e / 16 + 1) * LD + e % 16] =",
        "out of bounds of a threadgroup array",
        False,
    ),
    Fault(
        "unwritten threadgroup memory", "e < 512; e", "e < 500; e", "unwritten threadgroup", False
    ),
    Fault("read past an input", "b[(n0 + e / 16)", "b[(n0 + e / 16 + 1)", OUTSIDE, True),
    Fault("read before an input", "a[(m0 + e / 16)", "a[(m0 + e / 16 - 1)", OUTSIDE, False),
    Fault("write past an output", STORE, STORE.replace("8, 96", "8 + 8, 96"), OUTSIDE, True),
    Fault("write to an input", HEAD, HEAD + " ((device float*)a)[0] = 1;", "write to input", True),
    Fault("too much threadgroup memory", "ws[32 * LD];", "ws[32 * LD];" + BIG, "limit 32768", True),
)


def product(source: str, check: bool, order: int = 0) -> tuple[np.ndarray, LaunchStats]:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (64, 64)), rng.integers(-8, 8, (96, 64))
    factory = EmulatedKernelFactory(
        CompileOptions(check=check), LaunchOptions(check=check, order=order)
    )
    kernel = factory(name="product", input_names=["a", "b"], output_names=["c"], source=source)
    (c,) = kernel(
        inputs=[a.astype(np.float32), b.astype(np.float32)],
        grid=(3 * 128, 2, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(64, 96)],
        output_dtypes=[np.float32],
    )
    assert (c == a @ b.T).all()
    return c, kernel.stats


@pytest.mark.parametrize("check", [False, True])
def test_the_correct_product_is_clean(check: bool) -> None:
    """No false report, the right result, and every output byte written."""
    _, stats = product(PRODUCT, check)
    assert stats.unwritten_bytes == ({"c": 0} if check else {})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_check_mode_reports(fault: Fault) -> None:
    """Check mode names the fault."""
    assert fault.old in PRODUCT
    with pytest.raises(MetalError, match=fault.message):
        product(PRODUCT.replace(fault.old, fault.new), check=True)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.fast_mode], ids=lambda fault: fault.name)
def test_fast_mode_reports(fault: Fault) -> None:
    """These need no instrumentation."""
    with pytest.raises(MetalError, match=fault.message):
        product(PRODUCT.replace(fault.old, fault.new), check=False)


def test_a_missing_barrier_changes_results_under_some_schedule() -> None:
    """Without instrumentation, the schedules still tell."""
    source = PRODUCT.replace(FIRST, LOOP)
    wrong = 0
    for order in range(3):
        try:
            product(source, check=False, order=order)
        except AssertionError:
            wrong += 1
    assert wrong > 0


def test_unwritten_output_is_counted() -> None:
    """A kernel that leaves cells out is found by the count."""
    factory = EmulatedKernelFactory(CompileOptions(check=True), LaunchOptions(check=True))
    kernel = factory(
        name="partial",
        input_names=["a"],
        output_names=["o"],
        source="uint i = thread_position_in_grid.x; if (i != 3) o[i] = a[i];",
    )
    kernel(
        inputs=[np.zeros(32, np.float32)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[np.float32],
    )
    assert kernel.stats.unwritten_bytes == {"o": 4}


def test_too_many_threads() -> None:
    """Groups of more than 1,024 threads exist nowhere."""
    kernel = EmulatedKernelFactory()(
        name="wide",
        input_names=["a"],
        output_names=["o"],
        source="o[thread_position_in_grid.x] = a[0];",
    )
    with pytest.raises(MetalError, match="more than 1024 threads"):
        kernel(
            inputs=[np.zeros(32, np.float32)],
            grid=(2048, 1, 1),
            threadgroup=(2048, 1, 1),
            output_shapes=[(2048,)],
            output_dtypes=[np.float32],
        )


def test_float_does_not_become_bfloat_by_itself() -> None:
    """Metal refuses the implicit conversion, and so does the harness."""
    kernel = EmulatedKernelFactory()(
        name="narrow",
        input_names=["a"],
        output_names=["o"],
        source="bfloat x = a[0] * 2.0f; o[0] = float(x);",
    )
    with pytest.raises(MetalError, match="implicit conversion"):
        kernel(
            inputs=[np.zeros(32, np.float32)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[np.float32],
        )
