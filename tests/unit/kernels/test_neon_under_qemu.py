"""The NEON unit, cross-compiled and run in an emulator: every kernel has the reference's bits."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


def _missing() -> str | None:
    """What keeps this machine from running the test."""
    if platform.machine() in ("aarch64", "arm64"):
        return "this processor has NEON: the tests of the kernels run it"
    if shutil.which(COMPILER) is None:
        return f"no cross compiler {COMPILER} (Debian: g++-aarch64-linux-gnu)"
    if not any(shutil.which(name) for name in EMULATORS):
        return "no emulator qemu-aarch64 (Debian: qemu-user)"
    if shutil.which("cmake") is None:
        return "no cmake"
    return None


@pytest.mark.timeout(400)
@pytest.mark.skipif(_missing() is not None, reason=f"NEON is not tested: {_missing()}")
def test_neon_equals_the_reference(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """On a processor with dot products and on one without, subnormal numbers kept and flushed."""
    # What was compiled last time is kept where pytest keeps such things, if it does.
    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path if cache is None else cache.mkdir("native-checks")
    done = subprocess.run(
        [ROOT / "scripts" / "native-checks", "neon"],
        env=os.environ | {"ISOBATCH_NATIVE_BUILD": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "linear: scalar neon neon-dotprod\n" in done.stdout
    assert "linear: scalar neon\n" in done.stdout
    assert done.stdout.count(" checks, 0 failed") == 2
