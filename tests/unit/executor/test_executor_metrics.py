"""Metrics: names, closed labels, children from the start, counts that add up."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import generate_latest

from executor_service import metrics as metrics_module
from executor_service import profile_metrics
from executor_service.engine.capabilities import (
    Build,
    Capabilities,
    ModelDescription,
    SelfTestResult,
)
from executor_service.engine.step_request import Outcome, StepAnswer
from executor_service.engine.weight_bytes import WeightBytes, weight_bytes
from executor_service.kv_cache.manager import KvOccupancy
from executor_service.metrics import Metrics
from executor_service.models.checkpoint import TokenizerData
from isobatch_kernels.program import (
    DenseType,
    DenseWeight,
    Dimensions,
    Linear,
    Program,
    QuantizedWeight,
    RopeSpec,
)
from isobatch_kernels.step import PathCount
from tests.support.profiles import full_profile
from tests.support.steps import LIMITS, Row, Want, step_request, step_results

CAPABILITIES = Capabilities(
    model=ModelDescription("toy", "llama", "X1", "00", 10, "toy.gguf", 16, 20),
    tokenizer=TokenizerData(b"{}", "", (), None, False, ()),
    limits=LIMITS,
    build=Build("0.1", "cpu", "a processor", "vnni", "0.32", 2),
    self_test=SelfTestResult(0, ()),
    profile=full_profile(),
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CAPABILITIES, kv_pool_bytes=4096, weight_bytes=WeightBytes(1000, 24))


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
        metrics.observe_step(request, answer, 1000)
    labels = {"op": "linear", "path": "gemv_multi", "unit": "vnni"}
    assert _value(metrics, "kernel_dispatches_total", **labels) == 120
    assert _value(metrics, "kernel_rows_total", **labels) == 4
    written = {"model": "toy", "numeric_class": "X1"}
    assert _value(metrics, "kv_positions_written_total", **written) == 4
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
    metrics.observe_step(step_request(1, rows), _answer(()), 1000)
    for each in metrics_module.PHASES:
        count = _value(metrics, "forward_seconds_count", model="toy", phase=each)
        assert count == (1 if each == phase else 0)


def test_a_refused_step_counts_no_rows(metrics: Metrics) -> None:
    answer = StepAnswer(1, Outcome.NO_CAPACITY, KvOccupancy(20, 0, 0, 0))
    metrics.observe_step(step_request(1, [Row(1, (5,))]), answer, 1000)
    assert _value(metrics, "steps_total", model="toy", outcome="no_capacity") == 1
    assert _value(metrics, "step_tokens_count", model="toy") == 0


def test_a_unit_that_shows_up_later_is_counted(metrics: Metrics) -> None:
    answer = _answer((PathCount("linear", "gemv", "scalar", 1, 1),))
    metrics.observe_step(step_request(1, [Row(1, (5,))]), answer, 1000)
    labels = {"op": "linear", "path": "gemv", "unit": "scalar"}
    assert _value(metrics, "kernel_dispatches_total", **labels) == 1


def test_the_page_is_short_and_its_names_are_documented(metrics: Metrics) -> None:
    page = generate_latest(metrics.registry).decode()
    assert len(page.splitlines()) <= 500
    names = set(re.findall(r"^# TYPE (isobatch_\w+)", page, re.MULTILINE))
    documented = set(re.findall(r"isobatch_executor_\w+", metrics_module.__doc__ or ""))
    assert names == documented
    assert np.all([name.startswith("isobatch_executor_") for name in names])


def test_the_phases_of_a_step_add_up_to_its_time(metrics: Metrics) -> None:
    answer = replace(_answer(()), queue_ns=2, prepare_ns=3)
    metrics.observe_step(step_request(1, [Row(1, (5,))]), answer, 100)
    sums = {
        phase: _value(metrics, "step_phase_seconds_sum", model="toy", phase=phase)
        for phase in metrics_module.STEP_PHASES
    }
    expected = {"queue": 2, "prepare": 3, "forward": 11, "statistics": 12, "other": 72}
    assert sums == {phase: value * 1e-9 for phase, value in expected.items()}
    assert sum(expected.values()) == 100


@pytest.mark.parametrize(("want", "num_bytes"), [(None, 1000), (Want(), 1024)])
def test_logits_read_more_weights(metrics: Metrics, want: Want | None, num_bytes: int) -> None:
    metrics.observe_step(step_request(1, [Row(1, (5,), want=want)]), _answer(()), 100)
    assert _value(metrics, "weight_bytes_read_total", model="toy") == num_bytes


def test_weight_bytes_are_those_of_linear_layers() -> None:
    packed, scales = np.zeros((6, 8), np.uint32), np.zeros((6, 2), np.float16)
    quantized = QuantizedWeight(packed, scales, None, bits=4, group_size=32)
    dense = DenseWeight(np.zeros((3, 64), np.float16), DenseType.FLOAT16)
    ops = (
        Linear("x", (quantized, dense), "y"),
        Linear("y", (dense,), "logits", wanted_only=True),
    )
    dimensions = Dimensions(64, 1, 1, 1, 64, 3, 16, 0.125)
    program = Program(dimensions, RopeSpec(10000.0, 64, interleaved=False), (), ops)
    assert weight_bytes(program) == WeightBytes(every_step=192 + 24 + 384, logits=384)


@pytest.mark.parametrize(
    ("result", "state"),
    [
        (SelfTestResult(0, ()), "not_run"),
        (SelfTestResult(56, ()), "passed"),
        (SelfTestResult(112, ("vnni",)), "fell_back"),
    ],
)
def test_the_state_of_the_self_test(result: SelfTestResult, state: str) -> None:
    metrics = Metrics(replace(CAPABILITIES, self_test=result), 1, WeightBytes(1, 1))
    for each in metrics_module.SELF_TEST_STATES:
        assert _value(metrics, "self_test_state", state=each) == (each == state)
    assert _value(metrics, "self_test_cases") == result.num_cases


def test_every_label_value_is_one_that_the_module_lists(metrics: Metrics) -> None:
    listed = {
        "op": set(metrics_module.PATHS),
        "path": {path for paths in metrics_module.PATHS.values() for path in paths},
        "state": {*metrics_module.STATES, *metrics_module.SELF_TEST_STATES},
        "kind": set(metrics_module.MEMORY_KINDS),
        "outcome": set(metrics_module.OUTCOMES.values()),
        "phase": {*metrics_module.PHASES, *metrics_module.STEP_PHASES, *profile_metrics.PHASES},
        "unit": {"vnni"},
        "model": {"toy"},
        "numeric_class": {"X1"},
        **profile_metrics.LABEL_VALUES,
    }
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        if family.name.startswith("isobatch_") and not family.name.endswith("_info"):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    found.setdefault(label, set()).add(value)
    found.pop("le")
    assert found == listed
