"""The report for people with a Mac, on the emulated device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from isobatch_kernels.metal.create import metal_is_available
from isobatch_kernels.metal.doctor import (
    LayerShape,
    RowTime,
    self_test_lines,
    table,
    time_rows,
    whole_step_line,
)
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.linear import LinearProfile
from tests.metal_on_cpu.harness.arrays import NumpyArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

SMALL = (LayerShape("a", 64, 128, 2), LayerShape("b", 32, 192, 1))


def test_times_cover_every_row_count() -> None:
    """One line a row count, each with the kernel that the profile picks."""
    launcher = Launcher(EmulatedKernelFactory(), NumpyArrays())
    times = time_rows(launcher, LinearProfile(), SMALL, (1, 3, 30), repeats=1)
    assert [(t.rows, t.path) for t in times] == [(1, "gemv"), (3, "gemv_multi"), (30, "gemm")]
    assert all(t.seconds >= t.best_seconds > 0 for t in times)
    ways = {f"{shape.name} {way}" for shape in SMALL for way in LinearProfile().choices(1)}
    assert set(times[0].best) <= ways


def test_the_table() -> None:
    """Tokens a second over all rows, and the bytes of 4.5-bit weights."""
    lines = table([RowTime(4, "gemv_multi", 0.05, 0.04, ("a gemm:32",))], SMALL)
    assert lines[-1] == "| 4 | gemv_multi | 50.0 | 80.0 | 0 | 40.0 | a gemm:32 |"


def test_self_test_lines() -> None:
    """Every path by name, all right here."""
    launcher = Launcher(EmulatedKernelFactory(), NumpyArrays())
    lines, right = self_test_lines(launcher, LinearProfile(), {(4, 32, 32)})
    assert right
    assert [line.split(":")[0] for line in lines] == [
        *("- gemm", "- gemv", "- gemv_multi", "- gemv_wide"),
    ]


def test_whole_steps_are_compared_too() -> None:
    """Attention and every other op, by steps of a tiny model."""
    found = whole_step_line(EmulatedKernelFactory(), NumpyArrays())
    assert found == ("- whole steps: equal the contract", True)


@pytest.mark.skipif(metal_is_available(), reason="this machine has a Metal device")
def test_without_a_device_it_says_so() -> None:
    """Exit code 3 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "isobatch_kernels.metal.doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "No Metal device" in done.stderr
