"""Profiles for tests, from invented times."""

from __future__ import annotations

from executor_service.engine.profile import MEASURED, CostPoint, Profile, StepShape, monotone
from executor_service.engine.profile_measure import shapes
from executor_service.engine.step_request import Limits

_LIMITS = Limits(256, 512, 64, 8192, 4)


def profile_of(*points: tuple[int, int, int, int]) -> Profile:
    """A profile of (rows, tokens, context, nanoseconds)."""
    made = [CostPoint(StepShape(r, t, c), ns, 1, ns) for r, t, c, ns in points]
    return Profile(MEASURED, 77, monotone(made))


def full_profile() -> Profile:
    """A profile with every shape that is ever measured; each takes a microsecond."""
    usual = shapes(_LIMITS, 10**6, 16)
    return profile_of(*((s.num_rows, s.num_tokens, s.context_length, 1000) for s in usual))
