"""How the start-up self-test is told."""

from __future__ import annotations

import pytest

from executor_service.engine.capabilities import SelfTestResult, backend_name, numeric_class

kernels = pytest.importorskip(
    "executor_service.engine.kernels", reason="the native CPU module is not built here"
)


@pytest.fixture(autouse=True)
def _all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available_units", lambda: ("vnni", "avx2", "scalar"))
    monkeypatch.delenv(kernels.UNIT_VARIABLE, raising=False)


def test_the_fastest_unit_refused_nobody() -> None:
    assert kernels.self_test_of("auto")("vnni") == SelfTestResult(kernels.NUM_CASES, ())


def test_faster_units_that_this_machine_has_were_refused() -> None:
    result = kernels.self_test_of("auto")("scalar")
    assert result == SelfTestResult(3 * kernels.NUM_CASES, ("vnni", "avx2"))


def test_a_unit_asked_for_by_name_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.self_test_of("scalar")("scalar") == SelfTestResult(0, ())
    monkeypatch.setenv(kernels.UNIT_VARIABLE, "avx2")
    assert kernels.self_test_of("auto")("avx2") == SelfTestResult(0, ())


def test_names() -> None:
    assert [backend_name(unit) for unit in ("vnni", "scalar", "metal")] == ["cpu", "cpu", "metal"]
    assert numeric_class("1f2e3d4c") == "X1.1-a12-kvf16-rope1f2e3d4c"
