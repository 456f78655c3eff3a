"""Every metric of the executor, and the page that shows them.

| name                                      | type      | labels          |
|-------------------------------------------|-----------|-----------------|
| isobatch_executor_kernel_dispatches_total | counter   | op, path, unit  |
| isobatch_executor_kernel_rows_total       | counter   | op, path, unit  |
| isobatch_executor_steps_total             | counter   | model, outcome  |
| isobatch_executor_step_tokens             | histogram | model           |
| isobatch_executor_step_rows               | histogram | model           |
| isobatch_executor_forward_seconds         | histogram | model, phase    |
| isobatch_executor_step_phase_seconds      | histogram | model, phase    |
| isobatch_executor_weight_bytes_read_total | counter   | model           |
| isobatch_executor_non_finite_rows_total   | counter   | model           |
| isobatch_executor_kv_blocks               | gauge     | model, state    |
| isobatch_executor_kv_positions_written_total | counter | model, numeric_class |
| isobatch_executor_memory_bytes            | gauge     | kind            |
| isobatch_executor_self_test_state         | gauge     | state           |
| isobatch_executor_self_test_cases         | gauge     |                 |
| isobatch_executor_profile_info            | gauge     | model, origin   |
| isobatch_executor_profile_measured_timestamp_seconds | gauge | model    |
| isobatch_executor_cost_seconds            | gauge     | model, phase, tokens, context |
| isobatch_executor_decode_steps_total      | counter   | model, rows     |
| isobatch_executor_decode_seconds_total    | counter   | model, rows     |
| isobatch_executor_decode_expected_seconds_total | counter | model, rows  |
| isobatch_executor_speed_ratio             | gauge     | model, rows     |
| isobatch_executor_speed_check_timestamp_seconds | gauge | model         |
| isobatch_executor_build_info              | gauge = 1 | version, device, unit, mlx_version |
| isobatch_executor_model_info              | gauge = 1 | model, architecture, numeric_class,
|                                           |           | kv_class        |

`model` is the only open label. Children are created at start, so that an idle panel shows 0; of
kernel paths, those that the unit in use can take.

Bytes of weights count each weight once a step, as the least that has to be read; divided by the
time of the forward pass they are the effective bandwidth. The phases of a step do not overlap and
add up to the time from its arrival to its answer; of a step that waited for the one ahead of it,
from the end of that one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from executor_service.engine.capabilities import KV_CLASS
from executor_service.engine.step_request import MAX_STEPS_IN_FLIGHT, Outcome
from executor_service.instruments import Counter, Family, Gauge, Histogram
from executor_service.profile_metrics import ProfileMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from executor_service.engine.capabilities import Capabilities, SelfTestResult
    from executor_service.engine.step_request import StepAnswer, StepRequest
    from executor_service.engine.weight_bytes import WeightBytes
    from executor_service.kv_cache.manager import KvOccupancy
    from isobatch_kernels.step import PathCount

PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "embed": ("other",),
    "norm_quantize": ("other",),
    "quantize": ("other",),
    "linear": ("gemv", "gemv_multi", "gemm"),
    "rope_write_kv": ("other",),
    "paged_attention": ("attention_decode", "attention_prefill"),
    "gate_quantize": ("other",),
    "row_statistics": ("other",),
}
PHASES: Final = ("decode", "prefill", "mixed")
STEP_PHASES: Final = ("queue", "prepare", "forward", "statistics", "other")
SELF_TEST_STATES: Final = ("passed", "fell_back", "not_run")
STATES: Final = ("active", "cached", "free")
MEMORY_KINDS: Final = ("resident", "kv_pool")
OUTCOMES: Final[Mapping[Outcome, str]] = {
    Outcome.COMPUTED: "computed",
    Outcome.NO_CAPACITY: "no_capacity",
    Outcome.SOURCE_NOT_COMPUTED: "source_not_computed",
}
_SECONDS: Final = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096,
    0.128, 0.256, 0.512, 1.0,
)  # fmt: skip
_PHASE_SECONDS: Final = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class _BeforePage(Collector):
    """Has no metrics of its own, and does something before others show theirs."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def describe(self) -> tuple[()]:
        """Return nothing: it is asked when it is registered."""
        return ()

    def collect(self) -> tuple[()]:
        """Act, and return nothing."""
        self._act()
        return ()


class Metrics:
    """All metrics in one registry of their own."""

    def __init__(
        self, capabilities: Capabilities, kv_pool_bytes: int, weight_bytes: WeightBytes
    ) -> None:
        registry = self.registry = CollectorRegistry()
        # First, so that what it puts in shows on the page that asks.
        registry.register(_BeforePage(self._before_page))
        ProcessCollector(registry=registry)
        model, build = capabilities.model, capabilities.build
        model_id = model.model_id

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Family[Counter]:
            return Family(Counter, f"isobatch_executor_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...]) -> Family[Gauge]:
            return Family(Gauge, f"isobatch_executor_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
        ) -> Family[Histogram]:
            full = f"isobatch_executor_{name}"
            return Family(lambda: Histogram(bounds), full, text, labels, registry=registry)

        kernel = ("op", "path", "unit")
        dispatches = counter("kernel_dispatches_total", "Kernel dispatches.", kernel)
        rows = counter("kernel_rows_total", "Rows over all kernel dispatches.", kernel)
        self._dispatches = dispatches
        self._rows = rows
        self._kernels = {
            (op, path, build.unit): (
                dispatches.labels(op, path, build.unit),
                rows.labels(op, path, build.unit),
            )
            for op, paths in PATHS.items()
            for path in paths
        }
        steps = counter("steps_total", "Steps by outcome.", ("model", "outcome"))
        self._steps = {key: steps.labels(model_id, name) for key, name in OUTCOMES.items()}
        label = ("model",)
        self._tokens = histogram("step_tokens", "Tokens of a step.", label, _COUNTS).labels(
            model_id
        )
        self._step_rows = histogram("step_rows", "Token rows of a step.", label, _COUNTS).labels(
            model_id
        )
        forward = histogram(
            "forward_seconds", "Forward pass of a step.", ("model", "phase"), _SECONDS
        )
        self._forward = {phase: forward.labels(model_id, phase) for phase in PHASES}
        step_phase = histogram(
            "step_phase_seconds",
            "Parts of the time from a step's arrival to its answer.",
            ("model", "phase"),
            _PHASE_SECONDS,
        )
        self._phases = {phase: step_phase.labels(model_id, phase) for phase in STEP_PHASES}
        self._weight_bytes = weight_bytes
        self._bytes_read = counter(
            "weight_bytes_read_total", "Bytes of weights that steps had to read.", label
        ).labels(model_id)
        self._non_finite = counter(
            "non_finite_rows_total", "Rows that met a NaN or an infinity.", label
        ).labels(model_id)
        self._positions = counter(
            "kv_positions_written_total",
            "Cache positions that steps wrote, by the numeric class of their provenance.",
            ("model", "numeric_class"),
        ).labels(model_id, model.numeric_class)
        blocks = gauge("kv_blocks", "Blocks of the key/value cache.", ("model", "state"))
        self._blocks = {state: blocks.labels(model_id, state) for state in STATES}
        memory = gauge("memory_bytes", "Memory of the process.", ("kind",))
        memory.labels("kv_pool").set(kv_pool_bytes)
        self._process, self._resident = psutil.Process(os.getpid()), memory.labels("resident")
        state_now = _self_test_state(capabilities.self_test)
        states = gauge("self_test_state", "1 for the state of the kernels' self-test.", ("state",))
        for state in SELF_TEST_STATES:
            states.labels(state).set(state == state_now)
        cases = gauge("self_test_cases", "Cases that the self-test compared.", ())
        cases.labels().set(capabilities.self_test.num_cases)
        gauge(
            "model_info",
            "The loaded model; always 1.",
            ("model", "architecture", "numeric_class", "kv_class"),
        ).labels(model_id, model.architecture, model.numeric_class, KV_CLASS).set(1)
        gauge(
            "build_info", "The software; always 1.", ("version", "device", "unit", "mlx_version")
        ).labels(build.version, build.device, build.unit, build.mlx_version).set(1)
        self._blocks["free"].set(model.num_blocks)
        self.profile = ProfileMetrics(registry, model_id, capabilities.profile)
        self._paths_lock = threading.Lock()
        self._last_paths: tuple[PathCount, ...] = ()
        self._num_last_paths = 0
        self._last_answers: deque[StepAnswer] = deque(maxlen=MAX_STEPS_IN_FLIGHT)

    def observe_occupancy(self, counts: KvOccupancy) -> None:
        """Show the counts of blocks."""
        self._blocks["free"].set(counts.free_blocks)
        self._blocks["cached"].set(counts.evictable_blocks)
        used = counts.total_blocks - counts.free_blocks - counts.evictable_blocks
        self._blocks["active"].set(used)

    def observe_step(self, request: StepRequest, answer: StepAnswer, total_ns: int) -> None:
        """Count a step that was computed or refused for want of blocks, but not its repetition.

        `total_ns` is the time from the step's arrival to its answer.
        """
        if answer in self._last_answers:  # compared by identity
            return
        self._last_answers.append(answer)
        self._steps[answer.outcome].inc()
        self.observe_occupancy(answer.occupancy)
        results = answer.results
        self._observe_phases(answer, total_ns)
        if results is None:
            return
        self._tokens.observe(len(request.token_ids))
        self._positions.inc(len(request.token_ids))
        self._step_rows.observe(len(request.sequence_ids))
        num_rows = len(request.sequence_ids)
        single, several = num_rows, 0
        if len(request.token_ids) != num_rows:
            single = int((request.num_tokens == 1).sum())
            several = num_rows - single
        phase = "mixed" if single and several else "prefill" if several else "decode"
        self._forward[phase].observe(results.forward_ns * 1e-9)
        if phase == "decode":
            self.profile.observe_decode(request, results.forward_ns + results.statistics_ns)
        has_wanted = len(request.wanted) > 0
        self._bytes_read.inc(self._weight_bytes.of_step(has_wanted=has_wanted))
        if results.non_finite_details:
            self._non_finite.inc(len(results.non_finite_details))
        # The page's thread counts as well.
        with self._paths_lock:
            # Steps of one size dispatch the same kernels.
            if results.paths != self._last_paths:
                self._count_paths()
                self._last_paths = tuple(results.paths)
            self._num_last_paths += 1

    def _before_page(self) -> None:
        with self._paths_lock:
            self._count_paths()
        self._resident.set(self._process.memory_info().rss)

    def _count_paths(self) -> None:
        """Count the kernels of the last steps: when these change, or somebody looks."""
        num_steps, self._num_last_paths = self._num_last_paths, 0
        for count in self._last_paths if num_steps else ():
            key = (count.op, count.path, count.unit)
            pair = self._kernels.get(key)
            if pair is None:
                # A backend may mix units; the set of triples stays small, as all are enums.
                pair = (self._dispatches.labels(*key), self._rows.labels(*key))
                self._kernels[key] = pair
            pair[0].inc(num_steps * count.dispatches)
            pair[1].inc(num_steps * count.rows)

    def _observe_phases(self, answer: StepAnswer, total_ns: int) -> None:
        results = answer.results
        forward_ns = 0 if results is None else results.forward_ns
        statistics_ns = 0 if results is None else results.statistics_ns
        known_ns = answer.queue_ns + answer.prepare_ns + forward_ns + statistics_ns
        phases = self._phases
        phases["queue"].observe(answer.queue_ns * 1e-9)
        phases["prepare"].observe(answer.prepare_ns * 1e-9)
        phases["forward"].observe(forward_ns * 1e-9)
        phases["statistics"].observe(statistics_ns * 1e-9)
        phases["other"].observe(max(0, total_ns - known_ns) * 1e-9)


def _self_test_state(result: SelfTestResult) -> str:
    if result.refused:
        return "fell_back"
    return "passed" if result.num_cases else "not_run"
