"""How the start-up self-test is told."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from executor_service.engine.capabilities import (
    SelfTestResult,
    backend_name,
    device_name,
    numeric_class,
)

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
kernels = pytest.importorskip("executor_service.engine.kernels")
self_test = pytest.importorskip("isobatch_kernels.self_test")


class _Backend:
    def __init__(self, unit: str) -> None:
        self.unit = unit


def _account(asked: str, got: str, backend: str = "auto") -> SelfTestResult:
    result: SelfTestResult = kernels.self_test_of(backend, asked)(_Backend(got))
    return result


@pytest.fixture(autouse=True)
def _all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available_units", lambda: ("vnni", "avx2", "scalar"))
    monkeypatch.setattr(kernels, "device_is_available", lambda _: False)
    monkeypatch.delenv(kernels.UNIT_VARIABLE, raising=False)


def test_the_fastest_unit_refused_nobody() -> None:
    assert _account("auto", "vnni") == SelfTestResult(self_test.NUM_CASES, ())


def test_faster_units_that_this_machine_has_were_refused() -> None:
    result = _account("auto", "scalar")
    assert result == SelfTestResult(3 * self_test.NUM_CASES, ("vnni", "avx2"))


def test_a_unit_asked_for_by_name_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _account("scalar", "scalar") == SelfTestResult(0, ())
    monkeypatch.setenv(kernels.UNIT_VARIABLE, "avx2")
    assert _account("auto", "avx2") == SelfTestResult(0, ())


def test_a_device_that_could_not_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "device_is_available", lambda device: device == "metal")
    assert _account("auto", "vnni") == SelfTestResult(self_test.NUM_CASES, ("metal",))
    assert _account("auto", "vnni", "cpu") == SelfTestResult(self_test.NUM_CASES, ())


def test_a_backend_without_a_self_test_of_its_own_has_no_cases() -> None:
    assert _account("auto", "cuda") == SelfTestResult(0, ())


def test_a_mac_is_named_by_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, "Apple M2 Max\n")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    assert device_name() == "Apple M2 Max"
    assert [each[-1] for each in calls] == ["machdep.cpu.brand_string"]

    def no_sysctl(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(subprocess, "run", no_sysctl)
    assert device_name() == platform.machine()


def test_names() -> None:
    assert [backend_name(unit) for unit in ("vnni", "scalar", "metal")] == ["cpu", "cpu", "metal"]
    assert numeric_class("1f2e3d4c") == "X1.1-a12-kvf16-rope1f2e3d4c"
