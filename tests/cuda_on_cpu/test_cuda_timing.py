"""Tile sizes chosen by a clock: which are tried, what is kept, and that no bit changes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.cuda import self_test, timing
from isobatch_kernels.cuda.device import KernelKey
from isobatch_kernels.cuda.launch import Choice, Launcher, rows_constants
from isobatch_kernels.cuda.one_layer import LinearOnDevice
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.timing import LinearUse, RowsTimer
from isobatch_kernels.cuda.tuning import RowsShape, Sizes, rows_candidates
from isobatch_kernels.cuda.weights import BFLOAT16, FLOAT16, FLOAT32, WeightFormat
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
    compared: list[object] = []

    def compare(_: object, chosen: Mapping[Choice, RowsShape]) -> Iterator[str]:
        compared.extend(chosen)
        return iter(())

    monkeypatch.setattr(timing, "_differences", compare)
    uses = [LinearUse((layer.packed,), logit=False)]
    RowsTimer(device, layer.launcher, Scratch(device)).choose(uses, 4)
    assert layer.launcher.timed[layer.packed.format, 4] == wanted
    assert compared == [(layer.packed.format, top, False) for top in (2, 4)]
    assert [len(json.loads(f.read_text())) for f in tmp_path.glob("cuda/choices-*")] == [2]
    monkeypatch.setattr(RowsTimer, "_seconds", lambda *_: pytest.fail("timed again"))
    again = Launcher(device, Scratch(device), 1, 1, 64)
    RowsTimer(device, again, Scratch(device)).choose(uses, 4)
    assert again.timed == layer.launcher.timed
    x = random_rows(np.random.default_rng(2), 4, 640)
    expected, finite = self_test.reference_results(weight, 64, x)
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
    case = timing.Case(use, 2)
    assert case.sizes == Sizes(3, 144, 64, 1)
    shape = rows_candidates(2, case.sizes, device.chip)[0]
    key = case.key(shape)
    assert timer._seconds(use, 2, key, shape) == pytest.approx(1.0)
    monkeypatch.setattr(timing, "_BYTES", layer.packed.size * 3)
    assert timer._seconds(use, 2, key, shape) * 3 == pytest.approx(3.0)
    assert device.graphs == 0
    layer.close()
    scratch.close()
    device.close()


def _shape(slices: int, cluster: int, teams: int, sets: int) -> RowsShape:
    return RowsShape(1, 1, 8, slices, cluster, teams, sets, 1, 4, 1, (1, 1, 1), 0)


CHOSEN = {
    (WeightFormat(4, 64, FLOAT16, 9999, 640), 8, False): _shape(4, 2, 2, 2),
    (WeightFormat(4, 32, BFLOAT16, 40, 640), 8, True): _shape(8, 1, 1, 1),
    (WeightFormat(8, 16, FLOAT16, 40, 640), 8, False): _shape(1, 8, 4, 2),
    (WeightFormat(8, 32, FLOAT32, 40, 640), 8, False): _shape(2, 4, 2, 1),
}


def test_what_was_chosen_is_compared_with_the_contract(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernel in small, every type of scale; a wrong bit is told."""
    launched: list[KernelKey] = []

    def launch(key: KernelKey, *arguments: Any, early: bool) -> None:
        launched.append(key)
        EmulatedDevice.launch(device, key, *arguments, early=early)

    monkeypatch.setattr(device, "launch", launch)
    assert list(self_test.chosen_differences(device, CHOSEN)) == []
    rows = [dict(key.constants) for key in launched if key.name == "linear_rows"]
    for ((form, _, logit), shape), constants in zip(CHOSEN.items(), rows, strict=True):
        wanted = {**rows_constants(shape, logit=logit), "ST": form.scale_type}
        wanted |= {"SB": form.storage_bits, "B": form.sub_block}
        assert constants == wanted
    one = dict([next(iter(CHOSEN.items()))])
    monkeypatch.setattr(timing, "native_module_error", lambda: "none is here")
    assert list(timing._differences(device, one)) == []
    monkeypatch.undo()
    monkeypatch.setattr(
        self_test, "reference_results", lambda w, b, x: (np.ones((8, w.num_outputs)), True)
    )
    assert len(list(timing._differences(device, one))) == 1
    device.close()


def test_a_wrong_choice_is_refused(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And timed again at the next start."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    weight = random_weight(np.random.default_rng(1), 40, 640, 4, 64, half=True)
    layer = LinearOnDevice(device, weight, 64, 8)
    monkeypatch.setattr(RowsTimer, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(timing, "_differences", lambda *_: iter(["a bit"]))
    uses = [LinearUse((layer.packed,), logit=False)]
    with pytest.raises(RuntimeError, match=r"\[cuda\] a chosen launch .* got a bit"):
        RowsTimer(device, layer.launcher, Scratch(device)).choose(uses, 4)
    assert not layer.launcher.timed
    assert not list(tmp_path.glob("cuda/choices-*"))
    layer.close()
    device.close()
