"""The kernels of this machine: the one place that knows how a backend is chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from executor_service.engine.capabilities import SelfTestResult
from isobatch_kernels.dispatch import (
    FAST_UNITS,
    UNIT_VARIABLE,
    available_units,
    create_backend,
)
from isobatch_kernels.self_test import NUM_CASES

if TYPE_CHECKING:
    from executor_service.engine.engine import SelfTest

__all__ = ["create_backend", "self_test_of"]


def self_test_of(asked_unit: str) -> SelfTest:
    """Return the account of the self-test behind a choice of unit.

    Left to choose, the dispatcher takes the fastest unit whose bits are the reference's, so every
    faster one that this machine has was refused. A unit that was asked for by name is not tested.
    """
    named = asked_unit if asked_unit != "auto" else os.environ.get(UNIT_VARIABLE, "")

    def result(unit: str) -> SelfTestResult:
        if named not in ("", "auto") or unit not in FAST_UNITS:
            return SelfTestResult(num_cases=0, refused=())
        faster = FAST_UNITS[: FAST_UNITS.index(unit)]
        refused = tuple(each for each in faster if each in available_units())
        return SelfTestResult(NUM_CASES * (len(refused) + 1), refused)

    return result
