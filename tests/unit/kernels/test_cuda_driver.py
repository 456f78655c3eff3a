"""How the driver is used: what is made is freed, errors have words, graphs are few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.cuda import driver, timing
from isobatch_kernels.cuda.device import KernelKey
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits
from isobatch_kernels.self_test import _steps, tiny_program
from tests.support.fake_cuda import FakeDriver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    """A driver that runs nothing, and a compiler that compiles nothing."""
    made = FakeDriver()
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(driver, "compile_kernel", lambda key, capability: key.name.encode())
    monkeypatch.setattr(timing, "_differences", lambda *_: iter(()))
    monkeypatch.setattr(driver, "compile_text", lambda name, text, capability: name.encode())
    return made


def test_a_whole_backend_gives_everything_back(fake: FakeDriver) -> None:
    """Two steps, the second of them recorded and replayed."""
    backend = CudaBackend(
        tiny_program(np.random.default_rng(1)),
        CudaLimits(40, 16, 4, 600),
        driver.DriverDevice(),
        timed=True,
    )
    recorded, replayed = (fake.calls[f"cuGraph{name}"] for name in ("Instantiate", "Launch"))
    assert recorded > 100  # what was timed
    steps = list(_steps(np.random.default_rng(2)))
    for step in [*steps, *[steps[-1]] * 5]:
        backend.run(step)
    # Two slots: each launches a shape once, then records it.
    assert fake.calls["cuGraphInstantiate"] == recorded + 2
    assert fake.calls["cuGraphLaunch"] == replayed + 4
    assert {attributes for _, _, attributes in fake.launches} == {0, 1, 2}
    assert {grid[2] for grid, _, attributes in fake.launches if attributes == 2} == {2, 4, 8}
    assert backend.device_name == "a fake"
    backend.read_block(3)
    backend.zero_blocks(np.array([1], np.int32))
    assert fake.live
    backend.close()
    backend.close()
    assert not fake.live
    assert fake.calls["cuGraphExecDestroy"] == recorded + 2
    assert fake.calls["cuDevicePrimaryCtxRelease"] == fake.calls["cuDevicePrimaryCtxRetain"] == 1


def test_errors_have_words(fake: FakeDriver) -> None:
    """What failed, and how."""
    device = driver.DriverDevice()
    fake.errors.add("cuMemAlloc")
    with pytest.raises(MemoryError, match=r"12 bytes must fit the GPU, got .*CUDA_ERROR_UNKNOWN"):
        device.allocate(12)
    fake.errors.add("cuLaunchKernelEx")
    with pytest.raises(RuntimeError, match="kernel gate must start, got CUDA_ERROR_UNKNOWN"):
        device.launch(KernelKey("gate", (), 0), (1, 1, 1), 32, [1, 2.5], early=True)
    fake.errors.add("cuInit")
    assert "cuInit must succeed" in str(driver.cuda_error())
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        driver.DriverDevice()


def test_arguments_lie_in_words_of_eight_bytes(fake: FakeDriver) -> None:
    """Addresses and integers as they are, floats as the bits of an fp32."""
    device = driver.DriverDevice()
    device.launch(KernelKey("gate", (), 0), (1, 2, 3), 32, [2**40 + 1, 1.5, 7], early=False)
    words: Any = device._words
    assert list(words[:3]) == [2**40 + 1, 0x3FC00000, 7]
    assert fake.launches == [((1, 2, 3), 32, 0)]
