"""The kernels of this machine: the one place that knows how a backend is chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from executor_service.engine.capabilities import SelfTestResult
from isobatch_kernels.dispatch import (
    DEVICES,
    FAST_UNITS,
    UNIT_VARIABLE,
    available_units,
    backend_error,
    create_backend,
    device_is_available,
)

if TYPE_CHECKING:
    from executor_service.engine.engine import SelfTest
    from isobatch_kernels.step import Backend

__all__ = ["backend_error", "create_backend", "self_test_of"]


def self_test_of(asked_backend: str, asked_unit: str) -> SelfTest:
    """Return the account of the self-test behind a choice of backend.

    Metal's is kept by the backend. Left to choose a unit of the CPU, the dispatcher takes the
    fastest whose bits are the reference's, so every faster one that this machine has was refused.
    So was a device, where the choice was free and the CPU computes. A unit that was asked for by
    name is not tested.
    """
    named = asked_unit if asked_unit != "auto" else os.environ.get(UNIT_VARIABLE, "")

    def result(backend: Backend) -> SelfTestResult:
        unit = backend.unit
        if unit == "metal":
            from isobatch_kernels.metal_backend import MetalBackend

            if isinstance(backend, MetalBackend):
                profile = backend.profile
                return SelfTestResult(profile.tested_cases, profile.refused)
        if unit == "cuda":
            from isobatch_kernels.cuda_backend import CudaBackend

            if isinstance(backend, CudaBackend):
                return SelfTestResult(backend.tested_cases, ())
        if named not in ("", "auto") or unit not in FAST_UNITS:
            return SelfTestResult(num_cases=0, refused=())
        from isobatch_kernels.self_test import NUM_CASES  # needs the native module

        faster = FAST_UNITS[: FAST_UNITS.index(unit)]
        refused = tuple(each for each in faster if each in available_units())
        num_cases = NUM_CASES * (len(refused) + 1)
        if asked_backend == "auto":
            refused = (*filter(device_is_available, DEVICES), *refused)
        return SelfTestResult(num_cases, refused)

    return result
