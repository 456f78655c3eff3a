"""What every test shares: where helpers are found, and how hard hypothesis looks.

Tests run against the *installed* packages. The repository's root therefore goes to the end of the
search path: there it gives `tests.support`, and never shadows an installed package.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

# The user's own configuration file is no part of a test.
os.environ["ISOBATCH_CONFIG"] = os.devnull
# Nothing may depend on how fast the machine is, nor leave something in the user's cache folder.
os.environ["ISOBATCH_EXECUTOR_PROFILE"] = "off"

# dev: quick, a new seed each run. ci: the same examples on every machine, so a red build is the
# change's own doing. nightly: long, new seeds. Deadlines are off: a shared machine stalls.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Run only when -m names them.
ON_REQUEST = ("bench", "stress")

# Whole processes with a real model take their time where other work shares the processors.
END_TO_END_TIMEOUT_SECONDS = 400


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out benchmarks and stress tests unless -m asks for them; give end-to-end tests time."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "e2e"):
            item.add_marker(pytest.mark.timeout(END_TO_END_TIMEOUT_SECONDS))
    asked_for = config.getoption("-m")
    left_out = [mark for mark in ON_REQUEST if mark not in asked_for]
    kept = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
