"""Instruction sets of the native CPU module, and which of them runs here.

The module itself is imported when it is asked for: an installation without it still has GPUs.
"""

from __future__ import annotations

import logging
import os

# In the order in which "auto" tries them. Each must give the reference's bits; a unit that does
# not is passed over. AMX comes behind VNNI: it was no faster where both were measured
# (docs/performance.md).
FAST_UNITS = ("vnni", "amx", "avx2", "neon", "scalar")
UNITS = (*FAST_UNITS, "reference")
UNIT_VARIABLE = "ISOBATCH_CPU_UNIT"

_log = logging.getLogger(__name__)


def native_module_error() -> str | None:
    """Why the native module cannot be used, or None where it can."""
    try:
        from isobatch_kernels import _cpu  # noqa: F401 - only whether it loads
    except ImportError as error:
        return str(error)
    return None


def named_unit(unit: str) -> str:
    """The unit asked for: by the argument, else by ISOBATCH_CPU_UNIT, else "auto"."""
    return unit if unit != "auto" else os.environ.get(UNIT_VARIABLE, "") or "auto"


def available_units() -> tuple[str, ...]:
    """Units that this processor and build have, in the order of preference, the reference last.

    Raises:
        ImportError: the native module is not installed.
    """
    from isobatch_kernels import _cpu

    return tuple(unit for unit in UNITS if _cpu.unit_available(unit))


def choose_unit(unit: str = "auto", activation_bits: int = 12) -> str:
    """The unit to use: the one named, or the fastest that passes the self-test.

    The environment's ISOBATCH_CPU_UNIT stands in for "auto".

    Raises:
        ImportError: the native module is not installed.
        ValueError: no such unit, or not on this machine.
        RuntimeError: no unit gives the reference's bits.
    """
    from isobatch_kernels import self_test

    unit = named_unit(unit)
    available = available_units()
    if unit != "auto":
        if unit not in available:
            known = ", ".join(("auto", *available))
            raise ValueError(f"[dispatch] unit must be one of {known}, got {unit!r}")
        return unit
    for candidate in FAST_UNITS:
        if candidate not in available:
            continue
        difference = self_test.first_difference(candidate, activation_bits)
        if difference is None:
            return candidate
        _log.warning(
            "unit %s differs from the reference (%s); falling back to a slower one",
            candidate,
            difference,
        )
    raise RuntimeError("[dispatch] some unit must equal the reference, got none that does")
