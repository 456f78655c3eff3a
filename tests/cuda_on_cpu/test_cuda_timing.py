"""Tile sizes chosen by a clock: which are tried, what is kept, and that no bit changes."""

import json
from pathlib import Path

import numpy as np
import pytest

from isobatch_kernels import _cpu
from isobatch_kernels.cuda import timing
from isobatch_kernels.cuda.launch import Launcher
from isobatch_kernels.cuda.one_layer import LinearOnDevice
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.timing import LinearUse, RowsTimer
from isobatch_kernels.cuda.tuning import Sizes, rows_candidates
from isobatch_kernels.self_test import random_rows, random_weight
from tests.cuda_on_cpu.emulated_device import COMPILER, EmulatedDevice
from tests.cuda_on_cpu.test_cuda_on_cpu import device

__all__ = ["device"]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="no clang++ on this machine"),
]


def test_the_fastest_is_used_and_remembered(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second timer takes what the first one kept, without a launch."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    weight = random_weight(np.random.default_rng(1), 40, 640, 4, 64, half=True)
    layer = LinearOnDevice(device, weight, 64, 8)
    candidates = rows_candidates(4, Sizes(3, 144, 64, 10), device.chip)
    assert {(c.slices, c.cluster) for c in candidates} == {(8, 1), (4, 2), (2, 4)}
    wanted = candidates[3]
    monkeypatch.setattr(RowsTimer, "_seconds", lambda *a: float(a[4] != wanted))
    uses = [LinearUse((layer.packed,), logit=False)]
    RowsTimer(device, layer.launcher, Scratch(device)).choose(uses, 4)
    assert layer.launcher.timed[layer.packed.format, 4] == wanted
    assert [len(json.loads(f.read_text())) for f in tmp_path.glob("cuda/choices-*")] == [2]
    monkeypatch.setattr(RowsTimer, "_seconds", lambda *_: pytest.fail("timed again"))
    again = Launcher(device, Scratch(device), 1, 1, 64)
    RowsTimer(device, again, Scratch(device)).choose(uses, 4)
    assert again.timed == layer.launcher.timed
    x = random_rows(np.random.default_rng(2), 4, 640)
    native = _cpu.LinearLayer.quantized(
        "reference", weight.packed, weight.scales, weight.biases, 4, 64, 64
    )
    expected, finite = np.empty((4, 40), np.float32), np.empty(4, np.bool_)
    native.forward(x, expected, finite)
    got, _ = layer.run(x)
    assert got[finite].tobytes() == expected[finite].tobytes()
    layer.close()
    device.close()


def test_graphs_of_matrices_larger_than_any_cache_are_short(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At least one launch, at most sixteen, over the matrices by turns."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    weight = random_weight(np.random.default_rng(1), 40, 64, 4, 64, half=True)
    layer, scratch = LinearOnDevice(device, weight, 64, 8), Scratch(device)
    timer = RowsTimer(device, layer.launcher, scratch)
    use = LinearUse((layer.packed,), logit=True)
    case = timing._Case(use, 2, Sizes(3, 144, 64, 1))
    shape = rows_candidates(2, case.sizes, device.chip)[0]
    key = case.key(shape)
    assert timer._seconds(use, 2, key, shape) == pytest.approx(1.0)
    monkeypatch.setattr(timing, "_BYTES", layer.packed.size * 3)
    assert timer._seconds(use, 2, key, shape) * 3 == pytest.approx(3.0)
    assert device.graphs == 0
    layer.close()
    scratch.close()
    device.close()
