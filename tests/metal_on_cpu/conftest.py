"""Kernels of Metal run on the CPU: pytest tests/metal_on_cpu.

The marker `metal_on_cpu` is on every test of this folder. A run that names neither the folder nor
the marker leaves them out: compiling every variant takes minutes the first time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.metal_on_cpu.harness.compiler import find_compiler

MARKER = "metal_on_cpu"
HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", f"{MARKER}: runs Metal kernels on the CPU; needs clang")


def _inside(path: Path) -> bool:
    return path == HERE or HERE in path.parents


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks this folder's tests; leaves them out unless asked for; skips them without clang."""
    own = [item for item in items if _inside(item.path)]
    for item in own:
        item.add_marker(MARKER)
        item.add_marker(pytest.mark.timeout(900))  # the first run compiles
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    if MARKER not in (config.getoption("-m") or "") and not any(_inside(path) for path in named):
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]
        return
    if find_compiler() is None:
        reason = "no clang++ was found; on Debian: apt-get install clang-19"
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))
