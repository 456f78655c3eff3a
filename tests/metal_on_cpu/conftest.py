"""Kernels of Metal run on the CPU: pytest tests/metal_on_cpu.

The marker `metal_on_cpu` is on every test of this folder. A run that names neither the folder nor
the marker does not collect it: compiling every variant takes minutes the first time.
"""

from __future__ import annotations

import platform
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collects this folder when an argument or -m names it."""
    if MARKER in (config.getoption("-m") or ""):
        return None
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(_inside(path) for path in named) else True


def _cannot_run() -> str | None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the fiber runtime is written for Linux on x86-64"
    if find_compiler() is None:
        return "no clang++ was found; on Debian: apt-get install clang-19"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks this folder's tests; skips them, saying why, where they cannot run."""
    reason = _cannot_run()
    for item in items:
        if not _inside(item.path):
            continue
        item.add_marker(MARKER)
        item.add_marker(pytest.mark.timeout(900))  # the first run compiles
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
