"""Which backend and which instruction set run a program."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch_kernels.cpu_units import (
    FAST_UNITS,
    UNIT_VARIABLE,
    UNITS,
    available_units,
    choose_unit,
    named_unit,
    native_module_error,
)
from isobatch_kernels.float_program import policy_of
from isobatch_kernels.kernel_policy import EXACT, MLX

if TYPE_CHECKING:
    from isobatch_kernels.program import Program
    from isobatch_kernels.step import Backend

__all__ = [
    "BACKENDS",
    "DEVICES",
    "FAST_UNITS",
    "UNITS",
    "UNIT_VARIABLE",
    "available_units",
    "backend_error",
    "choose_unit",
    "create_backend",
    "device_is_available",
]

# In the order in which "auto" looks for them; at most one is in a machine.
DEVICES = ("metal", "cuda")
BACKENDS = ("auto", "cpu", *DEVICES, "reference")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def device_is_available(device: str) -> bool:
    """Whether "metal" (MLX with its device) or "cuda" (a GPU and cuda-bindings) is here."""
    if device == "metal":
        from isobatch_kernels.metal.create import metal_is_available

        return metal_is_available()
    from isobatch_kernels.cuda.create import cuda_is_available

    return cuda_is_available()


def mlx_has_device(device: str) -> bool:
    """Whether MLX is here with a "metal" or "cuda" device, as float policies need. Imports MLX."""
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.metal.is_available() if device == "metal" else mx.cuda.is_available())


def _device_backend(device: str, program: Program, sizes: _Sizes) -> Backend:
    if program.activation_bits != 12:
        raise ValueError(
            f"[dispatch] activations of {program.activation_bits} bits need backend cpu, "
            f"got {device}"
        )
    # Imported late: most machines have neither the device nor a reason to load its code.
    limits = (
        sizes.num_blocks,
        sizes.block_size,
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
    )
    if device == "metal":
        from isobatch_kernels.metal.create import create_metal_backend
        from isobatch_kernels.metal_backend import MetalLimits

        return create_metal_backend(program, MetalLimits(*limits))
    from isobatch_kernels.cuda.create import create_cuda_backend
    from isobatch_kernels.cuda_backend import CudaLimits

    return create_cuda_backend(program, CudaLimits(*limits))


def _cpu_backend(program: Program, sizes: _Sizes, unit: str, num_threads: int) -> Backend:
    missing = native_module_error()
    if missing is not None:
        raise RuntimeError(f"[dispatch] {_NEEDS['cpu']}, got {missing}")
    from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits

    limits = CpuLimits(
        sizes.num_blocks,
        sizes.block_size,
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        num_threads,
    )
    return CpuBackend(program, limits, unit=choose_unit(unit, program.activation_bits))


def _float_backend(
    program: Program, policy: str, sizes: _Sizes, backend: str, unit: str, num_threads: int
) -> Backend:
    """Builds what runs a float policy: MLX on a device, else native code.

    On the CPU `mlx` is MLX's too; there is no native form of what it picks.
    """
    device = backend
    if backend == "auto":
        is_open = named_unit(unit) == "auto"
        device = next(filter(mlx_has_device, DEVICES), "cpu") if is_open else "cpu"
    if policy == MLX:
        return _mlx_backend(program, policy, sizes, device)
    if device in DEVICES:
        try:
            return _mlx_backend(program, policy, sizes, device)
        except (RuntimeError, ValueError) as error:
            if backend != "auto":
                raise
            _log.warning("%s cannot be used (%s); falling back to the CPU", device, error)
    unit = "reference" if device == "reference" else unit
    return _cpu_backend(program, sizes, unit, num_threads)


def _mlx_backend(program: Program, policy: str, sizes: _Sizes, device: str) -> Backend:
    if device == "reference":
        raise RuntimeError(
            f"[dispatch] policy {policy} needs MLX's kernels, got backend 'reference'"
        )
    if device in DEVICES and not mlx_has_device(device):
        raise RuntimeError(
            f"[dispatch] policy {policy} needs MLX with its {device} device, got none here"
        )
    missing = native_module_error()
    if missing is not None:
        raise RuntimeError(f"[dispatch] policy {policy}: {_NEEDS['cpu']}, got {missing}")
    try:
        from isobatch_kernels import mlx_device
        from isobatch_kernels.mlx_backend import MlxBackend
    except ImportError as error:
        raise RuntimeError(f"[dispatch] policy {policy} needs MLX, got {error}") from error
    from isobatch_kernels.step_check import StepLimits

    mlx_device.use_device(device)
    dims = program.dimensions
    limits = StepLimits(
        dims.vocab_size,
        dims.context_length,
        sizes.num_blocks,
        sizes.block_size,
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
    )
    return MlxBackend(program, limits)


_NEEDS = {
    "cpu": "the native CPU module must be built (reinstall isobatch with a C++ compiler)",
    "metal": "backend metal needs MLX and a Mac with Apple silicon",
    "cuda": "backend cuda needs an NVIDIA GPU and the package cuda-bindings (the extra `cuda`)",
}


def backend_error(backend: str, unit: str = "auto") -> str | None:
    """Why `create_backend` cannot make this backend on this machine; None where it can try.

    Imports MLX only where the native module does not decide it.
    """
    if backend in DEVICES:
        return None if device_is_available(backend) else f"{_NEEDS[backend]}, got none here"
    missing = native_module_error()
    if missing is None:
        return None
    if backend == "auto" and named_unit(unit) == "auto" and any(map(device_is_available, DEVICES)):
        return None
    return f"{_NEEDS['cpu']}, got {missing}"


def create_backend(
    program: Program,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    backend: str = "auto",
    unit: str = "auto",
    num_threads: int = 0,
) -> Backend:
    """Builds the backend that runs `program`.

    "auto" means Metal or CUDA where the device is here and its self-test passes, else the
    CPU. Naming a CPU unit, here or by ISOBATCH_CPU_UNIT, makes "auto" the CPU.

    Args:
        program: the model. Its weights are repacked and may be freed afterwards.
        num_blocks: blocks of the key/value cache.
        block_size: positions of a block; 16.
        max_num_seqs: most token rows of a step.
        max_num_batched_tokens: most tokens of a step.
        backend: "auto", "cpu", "metal", "cuda" or "reference" (the CPU's unit of that name).
        unit: "auto", "reference", "scalar", "avx2", "vnni", "amx" or "neon".
        num_threads: CPU threads that share a step; 0 for the number of usable CPUs.

    Raises:
        ValueError: an argument or the program does not fit.
        RuntimeError: the backend is not on this machine, or gives other bits than the contract's.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"[dispatch] backend must be one of {known}, got {backend!r}")
    if unit != "auto" and (backend in DEVICES or (backend == "reference" and unit != "reference")):
        raise ValueError(f"[dispatch] unit must be auto for backend {backend}, got {unit!r}")
    if block_size != 16:
        raise ValueError(f"[dispatch] block_size must be 16, got {block_size}")
    for name, value in (
        ("num_blocks", num_blocks),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise ValueError(f"[dispatch] {name} must be positive, got {value}")
    if num_threads < 0:
        raise ValueError(f"[dispatch] num_threads must not be negative, got {num_threads}")
    sizes = _Sizes(num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
    policy = policy_of(program)
    if policy != EXACT:
        return _float_backend(program, policy, sizes, backend, unit, num_threads)
    if backend in DEVICES:
        return _device_backend(backend, program, sizes)
    if backend == "reference":
        unit = "reference"
    if backend == "auto" and named_unit(unit) == "auto":
        for device in filter(device_is_available, DEVICES):
            try:
                return _device_backend(device, program, sizes)
            except (RuntimeError, ValueError) as error:
                if native_module_error() is not None:
                    raise
                _log.warning("%s cannot be used (%s); falling back to the CPU", device, error)
    return _cpu_backend(program, sizes, unit, num_threads)
