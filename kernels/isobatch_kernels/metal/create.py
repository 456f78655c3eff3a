"""Makes the Metal backend on a Mac: MLX's kernel factory and arrays, self-tested and warmed up."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.cpu_units import native_module_error
from isobatch_kernels.metal.arrays import MlxArrays
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.linear import LinearProfile
from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal.self_test import formats_of, verified_profile
from isobatch_kernels.metal_backend import MetalBackend, MetalLimits
from isobatch_kernels.rope_table import build_rope_table

if TYPE_CHECKING:
    from isobatch_kernels.cpu_backend import CpuLimits
    from isobatch_kernels.metal.arrays import ArrayLibrary, KernelFactory
    from isobatch_kernels.program import Program

CACHE_BYTES = 512 << 20  # freed memory that MLX keeps for the next step

_log = logging.getLogger(__name__)


def metal_is_available() -> bool:
    """Whether MLX is here and has a Metal device. Imports MLX."""
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.metal.is_available())


def mlx_kernel_factory() -> KernelFactory:
    """`mx.fast.metal_kernel`."""
    import mlx.core as mx

    factory: Any = mx.fast.metal_kernel
    return factory  # type: ignore[no-any-return]


def check_whole_steps(
    factory: KernelFactory, arrays: ArrayLibrary, linear: LinearProfile
) -> tuple[int, bool]:
    """Compares steps of a tiny model, so every kind of op, with the CPU's reference.

    Linear layers run by the path that all others fall back to: `verified_profile` compares them.

    Returns:
        The number of comparisons, 0 where the native module, which has the reference, is missing;
        and whether attention may give chunks threadgroups of their own.

    Raises:
        RuntimeError: one bit differs, also with attention in its other form.
    """
    if native_module_error() is not None:
        return 0, True
    from isobatch_kernels.self_test import programs_agree

    slow = replace(linear, use_gemv=False, use_gemm=False)
    for comparisons, use_split in ((1, True), (2, False)):
        profile = MetalProfile(linear=slow, use_split=use_split)

        def make(
            program: Program, sizes: CpuLimits, profile: MetalProfile = profile
        ) -> MetalBackend:
            table = build_rope_table(program.rope, program.dimensions.context_length)
            limits = MetalLimits(
                sizes.num_blocks, sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens
            )
            return MetalBackend(
                program,
                limits,
                kernel_factory=factory,
                arrays=arrays,
                rope_table=table,
                profile=profile,
            )

        if programs_agree(np.random.default_rng(1), make):
            if not use_split:
                _log.warning(
                    "Metal kernels attention_decode and attention_merge differ from the contract in"
                    " steps of a tiny model; they are not used on this device"
                )
            return comparisons, use_split
    raise RuntimeError("[metal] steps of a tiny model must equal the reference, got other bits")


def create_metal_backend(program: Program, limits: MetalLimits) -> MetalBackend:
    """A backend whose kernels were compared with the contract on this device.

    Raises:
        RuntimeError: no Metal device, or the kernels give other bits.
        ValueError: the program is malformed.
    """
    if not metal_is_available():
        raise RuntimeError("[metal] a Metal device is needed, got none from MLX")
    import mlx.core as mx

    begin = time.perf_counter()
    mx.set_default_device(mx.gpu)  # custom kernels run nowhere else
    # Results of attention over chunks grow with the context; MLX would keep every size of them.
    # The wired limit stays as it is: raising it has made whole machines stop (ml-explore/mlx#3186).
    mx.set_cache_limit(CACHE_BYTES)
    factory, arrays = mlx_kernel_factory(), MlxArrays()
    verified = verified_profile(Launcher(factory, arrays), LinearProfile(), formats_of(program))
    steps, use_split = check_whole_steps(factory, arrays, verified.profile)
    refused = verified.refused if use_split else (*verified.refused, "attention_decode")
    backend = MetalBackend(
        program,
        limits,
        kernel_factory=factory,
        arrays=arrays,
        rope_table=build_rope_table(program.rope, program.dimensions.context_length),
        profile=MetalProfile(
            linear=verified.profile,
            use_split=use_split,
            tested_cases=verified.num_cases + steps,
            refused=refused,
        ),
    )
    backend.warm_up()
    _log.info("Metal kernels self-tested and compiled in %.1f s", time.perf_counter() - begin)
    return backend
