"""Which profile a start uses: a stored one, a new one, or none."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from executor_service import logs
from executor_service.engine.profile import MEASURED, OFF, STORED, Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor_service.engine.profile_store import ProfileKey, ProfileStore

AUTO: Final = "auto"
MEASURE: Final = "measure"
_LOG = logs.get_logger(__name__)


def load_profile(
    mode: str,
    key: ProfileKey,
    store: ProfileStore,
    measure: Callable[[], Profile],
    now: Callable[[], float] = time.time,
) -> Profile:
    """Return the profile in force.

    `mode` auto takes the stored profile and measures where there is none; measure always measures;
    off has none; stored, which is not for users, never measures. What was measured is stored. A
    measurement that fails is a log line: steps of users may be others than the one that failed.
    """
    if mode == OFF:
        return Profile()
    stored = None if mode == MEASURE else store.read(key)
    if stored is not None or mode == STORED:
        return stored or Profile()
    begin = time.monotonic()
    try:
        profile = replace(measure(), origin=MEASURED, measured_at=int(now()))
    except Exception as error:
        _LOG.warning("profile cannot be measured", error=f"{type(error).__name__}: {error}")
        return Profile()
    if not profile.points:
        _LOG.warning("profile cannot be measured: the cache has no room for a step")
        return Profile()
    _LOG.info(
        "profile measured",
        seconds=round(time.monotonic() - begin, 3),
        points=len(profile.points),
        choices=dict(profile.choices),
        path=str(store.path(key)),
    )
    store.write(key, profile)
    return profile
