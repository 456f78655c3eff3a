"""On a Mac: every kernel case and whole steps on the real GPU, against the reference.

The same cases run under the emulation in tests/metal_on_cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.metal.create import create_metal_backend, metal_is_available
from isobatch_kernels.metal_backend import MetalLimits
from isobatch_kernels.self_test import tiny_program
from tests.metal_on_cpu.cases import activations, attention, linear, statistics
from tests.metal_on_cpu.cases.common import assert_same_bits
from tests.metal_on_cpu.harness.launcher import LaunchOptions
from tests.support.kernel_programs import Row, make_backend, make_step

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not metal_is_available(), reason="this machine has no Metal device"),
]
PROGRAM = tiny_program(np.random.default_rng(7))
CASES: tuple[Callable[..., None], ...] = (
    *activations.CASES,
    *linear.CASES,
    *attention.CASES,
    *statistics.CASES,
)


class DeviceFactory:
    """`mx.fast.metal_kernel` on numpy arrays. Apple's GPUs flush subnormal floats."""

    launch_options = LaunchOptions(flush_subnormals=True)

    def __call__(self, **description: Any) -> Any:
        """A kernel on the device."""
        import mlx.core as mx

        kernel: Any = mx.fast.metal_kernel(**description)

        def call(
            *,
            inputs: Sequence[Any],
            output_dtypes: Sequence[Any],
            template: Sequence[tuple[str, Any]] | None = None,
            **launch: Any,
        ) -> list[Any]:
            outputs = kernel(
                inputs=[mx.array(a) for a in inputs],
                output_dtypes=[getattr(mx, np.dtype(d).name) for d in output_dtypes],
                template=list(template) if template else None,
                **launch,
            )
            return [np.array(o) for o in outputs]

        return call


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernels_equal_the_reference(case: Callable[..., None]) -> None:
    """Bit for bit, on the device."""
    case(DeviceFactory())


def test_whole_steps_equal_the_reference() -> None:
    """Prefill of two sequences over a chunk border, then decoding; results and cache."""
    metal = create_metal_backend(PROGRAM, MetalLimits(64, 16, 8, 640))
    cpu = make_backend(PROGRAM, "reference")
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 1100, 275)]
    long, short = tuple(range(20)), (30, 31)
    steps = [
        make_step([Row(tokens, 0, long), Row(tokens[:7], 0, short)]),
        make_step([Row([3], 275, long), Row([4], 7, short)]),
        make_step([Row([5], 276, long)]),
    ]
    for step in steps:
        got, expected = metal.run(step), cpu.run(step)
        for name in ("logits", "argmax_ids", "normalizers", "quantile_ids", "top_k_ids"):
            assert_same_bits(getattr(got, name), getattr(expected, name), name)
    for block in range(64):
        assert_same_bits(metal.read_block(block), cpu.read_block(block))
