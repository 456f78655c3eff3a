"""Metal backends under the harness, beside CPU backends of the same program."""

from __future__ import annotations

from typing import Any

import numpy as np

from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal_backend import MetalBackend, MetalLimits
from isobatch_kernels.program import Program
from isobatch_kernels.step import StepInput, StepOutput
from tests.metal_on_cpu.cases.common import Float32, assert_same_bits
from tests.metal_on_cpu.harness.arrays import MlxArrays, MlxFrontedFactory, NumpyArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.support.kernel_programs import make_backend, native

FIELDS = (
    *("logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids", "top_k_starts"),
    *("top_k_ids", "top_k_logits", "top_k_weights", "non_finite_ops"),
)


def rope_table(program: Program) -> Float32:
    """The table that the native module makes."""
    rope = program.rope
    factors = None
    if rope.frequency_factors is not None:
        factors = np.asarray(rope.frequency_factors, np.float32)
    table = np.empty(program.dimensions.context_length * rope.rotary_dim, np.float32)
    native.reference.rope_table(table, rope.rotary_dim, rope.base, factors, rope.position_scale)
    return table


def metal_backend(
    program: Program,
    factory: EmulatedKernelFactory | None = None,
    *,
    mlx: bool = False,
    profile: MetalProfile | None = None,
    **limits: int,
) -> MetalBackend:
    """A backend with the limits of `make_backend`, over numpy or over MLX's own arrays."""
    kernels = factory or EmulatedKernelFactory()
    sizes = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 640} | limits
    return MetalBackend(
        program,
        MetalLimits(block_size=16, **sizes),
        kernel_factory=MlxFrontedFactory(kernels) if mlx else kernels,
        arrays=MlxArrays() if mlx else NumpyArrays(),
        rope_table=rope_table(program),
        profile=profile,
    )


class Pair:
    """A Metal backend and the CPU reference, run side by side."""

    def __init__(
        self, program: Program, factory: EmulatedKernelFactory | None = None, **options: Any
    ) -> None:
        limits = {k: v for k, v in options.items() if k.startswith(("num_", "max_"))}
        self.metal = metal_backend(program, factory, **options)
        self.cpu = make_backend(program, "reference", **limits)
        self._num_blocks = limits.get("num_blocks", 64)

    def run(self, step: StepInput) -> tuple[StepOutput, StepOutput]:
        """Runs both and compares every result."""
        got, expected = self.metal.run(step), self.cpu.run(step)
        for name in FIELDS:
            assert_same_bits(getattr(got, name), getattr(expected, name), name)
        return got, expected

    def assert_same_cache(self) -> None:
        """Every block of every layer."""
        for block in range(self._num_blocks):
            assert_same_bits(
                self.metal.read_block(block), self.cpu.read_block(block), f"block {block}"
            )
