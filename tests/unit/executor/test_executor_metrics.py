"""Metrics: names, closed labels, children from the start, counts that add up."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import generate_latest

from executor_service import metrics as metrics_module
from executor_service.engine.capabilities import (
    Build,
    Capabilities,
    ModelDescription,
    SelfTestResult,
)
from executor_service.engine.step_request import Outcome, StepAnswer
from executor_service.kv_cache.manager import KvOccupancy
from executor_service.metrics import Metrics
from executor_service.models.checkpoint import TokenizerData
from isobatch_kernels.step import PathCount
from tests.support.steps import LIMITS, Row, step_request, step_results

CAPABILITIES = Capabilities(
    model=ModelDescription("toy", "llama", "X1", "00", 10, "toy.gguf", 16, 20),
    tokenizer=TokenizerData(b"{}", "", (), None, False, ()),
    limits=LIMITS,
    build=Build("0.1", "cpu", "a processor", "vnni", "0.32", 2),
    self_test=SelfTestResult(0, ()),
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CAPABILITIES, kv_pool_bytes=4096)


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"isobatch_executor_{name}", labels)


def _answer(paths: tuple[PathCount, ...]) -> StepAnswer:
    return StepAnswer(
        1, Outcome.COMPUTED, KvOccupancy(20, 12, 3, 0), results=replace(step_results(), paths=paths)
    )


def test_idle_panels_show_zero(metrics: Metrics) -> None:
    for op, paths in metrics_module.PATHS.items():
        for path in paths:
            for name in ("kernel_dispatches_total", "kernel_rows_total"):
                assert _value(metrics, name, op=op, path=path, unit="vnni") == 0
    assert _value(metrics, "steps_total", model="toy", outcome="no_capacity") == 0
    assert _value(metrics, "kv_blocks", model="toy", state="free") == 20
    assert _value(metrics, "memory_bytes", kind="kv_pool") == 4096
    assert (_value(metrics, "memory_bytes", kind="resident") or 0) > 2**20
    build = {"version": "0.1", "device": "a processor", "unit": "vnni", "mlx_version": "0.32"}
    assert _value(metrics, "build_info", **build) == 1


def test_a_step_is_counted_once_however_often_it_is_answered(metrics: Metrics) -> None:
    request = step_request(1, [Row(1, (5, 6, 7)), Row(2, (8,))])
    answer = _answer((PathCount("linear", "gemv_multi", "vnni", 120, 4),))
    for _ in range(2):
        metrics.observe_step(request, answer)
    labels = {"op": "linear", "path": "gemv_multi", "unit": "vnni"}
    assert _value(metrics, "kernel_dispatches_total", **labels) == 120
    assert _value(metrics, "kernel_rows_total", **labels) == 4
    assert _value(metrics, "steps_total", model="toy", outcome="computed") == 1
    assert _value(metrics, "step_tokens_sum", model="toy") == 4
    assert _value(metrics, "step_rows_sum", model="toy") == 2
    assert _value(metrics, "forward_seconds_count", model="toy", phase="mixed") == 1
    assert _value(metrics, "non_finite_rows_total", model="toy") == 1
    states = [
        _value(metrics, "kv_blocks", model="toy", state=each) for each in metrics_module.STATES
    ]
    assert states == [5, 3, 12]


@pytest.mark.parametrize(
    ("lengths", "phase"), [((1, 1), "decode"), ((3, 2), "prefill"), ((1, 2), "mixed")]
)
def test_phases(metrics: Metrics, lengths: tuple[int, int], phase: str) -> None:
    rows = [Row(index, (5,) * length) for index, length in enumerate(lengths)]
    metrics.observe_step(step_request(1, rows), _answer(()))
    for each in metrics_module.PHASES:
        count = _value(metrics, "forward_seconds_count", model="toy", phase=each)
        assert count == (1 if each == phase else 0)


def test_a_refused_step_counts_no_rows(metrics: Metrics) -> None:
    answer = StepAnswer(1, Outcome.NO_CAPACITY, KvOccupancy(20, 0, 0, 0))
    metrics.observe_step(step_request(1, [Row(1, (5,))]), answer)
    assert _value(metrics, "steps_total", model="toy", outcome="no_capacity") == 1
    assert _value(metrics, "step_tokens_count", model="toy") == 0


def test_a_unit_that_shows_up_later_is_counted(metrics: Metrics) -> None:
    answer = _answer((PathCount("linear", "gemv", "scalar", 1, 1),))
    metrics.observe_step(step_request(1, [Row(1, (5,))]), answer)
    labels = {"op": "linear", "path": "gemv", "unit": "scalar"}
    assert _value(metrics, "kernel_dispatches_total", **labels) == 1


def test_the_page_is_short_and_its_names_are_documented(metrics: Metrics) -> None:
    page = generate_latest(metrics.registry).decode()
    assert len(page.splitlines()) <= 300
    names = set(re.findall(r"^# TYPE (isobatch_\w+)", page, re.MULTILINE))
    documented = set(re.findall(r"isobatch_executor_\w+", metrics_module.__doc__ or ""))
    assert names == documented
    assert np.all([name.startswith("isobatch_executor_") for name in names])
