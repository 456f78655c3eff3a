"""When Metal, CUDA or the CPU computes. The devices are stand-ins; nothing here has a GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import isobatch_kernels
from isobatch_kernels import dispatch
from isobatch_kernels.cpu_units import native_module_error
from isobatch_kernels.metal import create
from isobatch_kernels.metal_backend import MetalLimits
from isobatch_kernels.program import Program
from isobatch_kernels.self_test import tiny_program
from tests.support.kernel_programs import UNITS

PROGRAM = tiny_program(np.random.default_rng(1))
SIZES: dict[str, Any] = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}


class _Metal:
    unit = "metal"

    def __init__(self, program: Program, limits: MetalLimits) -> None:
        self.program, self.limits = program, limits


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.UNIT_VARIABLE, raising=False)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal, whose backend only says what it was given."""
    monkeypatch.setattr(create, "metal_is_available", lambda: True)
    monkeypatch.setattr(create, "create_metal_backend", _Metal)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native module was not built."""
    monkeypatch.delattr(isobatch_kernels, "_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "isobatch_kernels._cpu", None)


def _refuse(error: Exception) -> Callable[..., Any]:
    def create_metal_backend(*_: object) -> None:
        raise error

    return create_metal_backend


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("backend", ["auto", "metal"])
def test_metal_where_it_is(backend: str) -> None:
    """By name or by itself, with the sizes asked for."""
    made = dispatch.create_backend(PROGRAM, backend=backend, **SIZES)
    assert isinstance(made, _Metal)
    assert (made.program, made.limits) == (PROGRAM, MetalLimits(4, 16, 2, 8))


@pytest.mark.usefixtures("mac")
def test_a_unit_of_the_cpu_by_name_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, by the variable, or by backend cpu or reference."""
    for backend in ("auto", "cpu"):
        made = dispatch.create_backend(PROGRAM, backend=backend, unit="scalar", **SIZES)
        assert made.unit == "scalar"
    assert dispatch.create_backend(PROGRAM, backend="reference", **SIZES).unit == "reference"
    assert dispatch.create_backend(PROGRAM, backend="cpu", **SIZES).unit == UNITS[-1]
    monkeypatch.setenv(dispatch.UNIT_VARIABLE, "scalar")
    assert dispatch.create_backend(PROGRAM, **SIZES).unit == "scalar"


@pytest.mark.usefixtures("mac", "no_native")
def test_a_mac_without_the_native_module_uses_metal() -> None:
    """Nothing of the CPU's is loaded; asking for the CPU says what is missing."""
    assert native_module_error() is not None
    assert dispatch.backend_error("auto") is None
    assert dispatch.create_backend(PROGRAM, **SIZES).unit == "metal"
    with pytest.raises(RuntimeError, match="native CPU module must be built"):
        dispatch.create_backend(PROGRAM, backend="cpu", **SIZES)
    assert "native CPU module" in str(dispatch.backend_error("cpu"))
    assert "native CPU module" in str(dispatch.backend_error("auto", "scalar"))


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("error", [RuntimeError("other bits"), ValueError("head too wide")])
def test_a_mac_whose_metal_is_refused_falls_back_aloud(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the reason. Asked for by name, Metal does not turn into something else."""
    monkeypatch.setattr(create, "create_metal_backend", _refuse(error))
    with caplog.at_level(logging.WARNING):
        assert dispatch.create_backend(PROGRAM, **SIZES).unit == UNITS[-1]
    (record,) = caplog.records
    assert f"metal cannot be used ({error}); falling back" in record.getMessage()
    with pytest.raises(type(error), match=str(error)):
        dispatch.create_backend(PROGRAM, backend="metal", **SIZES)


@pytest.mark.usefixtures("mac", "no_native")
def test_a_refused_metal_without_the_native_module_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing to fall back to."""
    monkeypatch.setattr(create, "create_metal_backend", _refuse(RuntimeError("other bits")))
    with pytest.raises(RuntimeError, match="other bits"):
        dispatch.create_backend(PROGRAM, **SIZES)


def test_a_machine_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU by itself; a device by name is refused before anything is loaded."""
    monkeypatch.setattr(dispatch, "device_is_available", lambda _: False)
    monkeypatch.setattr(create, "metal_is_available", lambda: False)
    assert dispatch.create_backend(PROGRAM, **SIZES).unit == UNITS[-1]
    with pytest.raises(RuntimeError, match="a Metal device is needed"):
        dispatch.create_backend(PROGRAM, backend="metal", **SIZES)
    assert "backend metal needs MLX" in str(dispatch.backend_error("metal"))
    assert "backend cuda needs an NVIDIA GPU" in str(dispatch.backend_error("cuda"))
    assert dispatch.backend_error("auto") is None


def test_without_mlx_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX is what drives Metal, and float policies on either."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert not dispatch.device_is_available("metal")
    assert [dispatch.mlx_has_device(each) for each in dispatch.DEVICES] == [False, False]


def test_without_cuda_bindings_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `cuda` brings them."""
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert not dispatch.device_is_available("cuda")
    with pytest.raises(RuntimeError, match="no package cuda-bindings"):
        dispatch.create_backend(PROGRAM, backend="cuda", **SIZES)


@pytest.mark.usefixtures("mac")
def test_short_activations_are_for_the_cpu() -> None:
    """A GPU asked for by name is refused; auto takes the CPU."""
    program = replace(PROGRAM, activation_bits=8)
    with pytest.raises(ValueError, match=r"activations of 8 bits need backend cpu, got metal"):
        dispatch.create_backend(program, **SIZES, backend="metal")
    backend = dispatch.create_backend(program, **SIZES)
    assert backend.unit == UNITS[-1]


def test_backends_of_gpus_can_be_imported_without_the_native_module() -> None:
    """An install without a compiler has all but the CPU's kernels."""
    lines = (
        "import sys; sys.modules['isobatch_kernels._cpu'] = None",
        "import isobatch_kernels.cuda.create, isobatch_kernels.cuda_backend",
        "import isobatch_kernels.dispatch, isobatch_kernels.metal_backend",
    )
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
