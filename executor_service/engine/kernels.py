"""The kernels of this machine: the one place that knows how a backend is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_service.engine.capabilities import SelfTestResult
from isobatch_kernels.dispatch import FAST_UNITS, available_units, create_backend

if TYPE_CHECKING:
    from executor_service.engine.engine import SelfTest

__all__ = ["create_backend", "self_test_of"]


def self_test_of(asked_unit: str) -> SelfTest:
    """Return the account of the self-test behind a choice of unit.

    Asked for "auto", the dispatcher takes the fastest unit whose bits are the reference's, so every
    faster one that this machine has was refused.
    """

    def result(unit: str) -> SelfTestResult:
        faster = FAST_UNITS[: FAST_UNITS.index(unit)] if unit in FAST_UNITS else ()
        refused = tuple(each for each in faster if each in available_units())
        return SelfTestResult(num_cases=0, refused=refused if asked_unit == "auto" else ())

    return result
