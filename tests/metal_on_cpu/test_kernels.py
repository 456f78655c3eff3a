"""Every kernel equals the reference, bit for bit, however the harness runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.metal_on_cpu.cases import activations, attention, linear, statistics
from tests.metal_on_cpu.harness.compiler import CompileOptions
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.launcher import RANDOM, REVERSE, LaunchOptions

Case = Callable[[EmulatedKernelFactory], None]
CASES: tuple[Case, ...] = (
    *activations.CASES,
    *linear.CASES,
    *attention.CASES,
    *statistics.CASES,
)
RUNS = {
    "plain": EmulatedKernelFactory(),
    "reverse": EmulatedKernelFactory(launch_options=LaunchOptions(order=REVERSE, sum_order=1)),
    "random": EmulatedKernelFactory(
        launch_options=LaunchOptions(order=RANDOM, seed=5, sum_order=2)
    ),
    "other random": EmulatedKernelFactory(
        launch_options=LaunchOptions(order=RANDOM, seed=11, sum_order=3)
    ),
    "subnormals flushed": EmulatedKernelFactory(
        launch_options=LaunchOptions(flush_subnormals=True)
    ),
    "contraction fast": EmulatedKernelFactory(CompileOptions(contract="fast")),
    "check": EmulatedKernelFactory(CompileOptions(check=True), LaunchOptions(check=True)),
}
MOST_THREADGROUP_BYTES = 16384
MOST_THREADS = 256


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_the_reference(case: Case, run: str) -> None:
    """One result under every schedule, sum order and number mode; check mode is clean."""
    factory = RUNS[run]
    case(factory)
    for name, largest in factory.largest.items():
        assert largest.threadgroup_bytes <= MOST_THREADGROUP_BYTES, name
        assert largest.threads_per_group <= MOST_THREADS, name
