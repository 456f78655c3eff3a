"""The profile's part of the metrics page; `metrics` has the table of all names."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from executor_service.engine.profile import ORIGINS, DecodeCost, StepShape
from executor_service.engine.profile_measure import CONTEXTS, DECODE_ROWS, PROMPT_TOKENS
from executor_service.engine.speed_check import ROWS
from executor_service.instruments import Counter, Family, Gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from executor_service.engine.profile import Profile
    from executor_service.engine.speed_check import SpeedResult
    from executor_service.engine.step_request import StepRequest

DECODE: Final = "decode"
PREFILL: Final = "prefill"
PHASES: Final = (DECODE, PREFILL)
# Decode steps by rows: a step counts at the least bound that holds its rows.
ROW_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MORE_ROWS: Final = "more"

LABEL_VALUES: Final = {
    "tokens": {str(each) for each in (*DECODE_ROWS, *PROMPT_TOKENS)},
    "context": {str(each) for each in CONTEXTS},
    "rows": {*(str(each) for each in (*ROW_BOUNDS, *ROWS)), MORE_ROWS},
}


class ProfileMetrics:
    """Gauges of the profile and of the speed check, and decode steps against the cost curve."""

    def __init__(self, registry: CollectorRegistry, model_id: str, profile: Profile) -> None:
        def gauge(name: str, text: str, *labels: str) -> Family[Gauge]:
            full = f"isobatch_executor_{name}"
            return Family(Gauge, full, text, ("model", *labels), registry=registry)

        def counter(name: str, text: str) -> Family[Counter]:
            full = f"isobatch_executor_{name}"
            return Family(Counter, full, text, ("model", "rows"), registry=registry)

        origin = gauge("profile_info", "1 for where the profile in force came from.", "origin")
        for each in ORIGINS:
            origin.labels(model_id, each).set(each == profile.origin)
        gauge(
            "profile_measured_timestamp_seconds", "When the profile was measured; 0 without one."
        ).labels(model_id).set(profile.measured_at)
        cost = gauge(
            "cost_seconds",
            "Time of a step by the cost curve, of decode rows or of a part of a prompt.",
            *("phase", "tokens", "context"),
        )
        for point in profile.points:
            shape = point.shape
            # A single token begins both.
            phases = PHASES if shape.num_tokens == 1 else (_phase(shape),)
            for phase in phases:
                cost.labels(
                    model_id, phase, str(shape.num_tokens), str(shape.context_length)
                ).set(point.duration_ns * 1e-9)  # fmt: skip
        self._cost = DecodeCost(profile)
        steps = counter("decode_steps_total", "Steps of decode rows alone, by rows.")
        seconds = counter("decode_seconds_total", "Time of these steps.")
        expected = counter(
            "decode_expected_seconds_total", "Time that the cost curve expects of these steps."
        )
        # By the index of the least bound that holds a step's rows.
        self._decode = [
            tuple(each.labels(model_id, rows) for each in (steps, seconds, expected))
            for rows in (*map(str, ROW_BOUNDS), MORE_ROWS)
        ]
        ratio = gauge(
            "speed_ratio",
            "Throughput at the last speed check over that of the profile; 1 before the first.",
            "rows",
        )
        self._ratios = {rows: ratio.labels(model_id, str(rows)) for rows in ROWS}
        for child in self._ratios.values():
            child.set(1)
        self._checked_at = gauge(
            "speed_check_timestamp_seconds", "When speed was last checked; 0 before the first time."
        ).labels(model_id)

    def observe_decode(self, request: StepRequest, nanoseconds: int) -> None:
        """Count a step whose rows have one token each."""
        num_rows = len(request.sequence_ids)
        steps, seconds, expected = self._decode[bisect_left(ROW_BOUNDS, num_rows)]
        steps.inc()
        seconds.inc(nanoseconds * 1e-9)
        # For a few rows this is quicker than the array's own sum.
        positions = sum(request.start_positions.tolist())
        expected.inc(self._cost.expected_ns(num_rows, positions) * 1e-9)

    def observe_speed(self, result: SpeedResult, now: float) -> None:
        """Show a speed check made at `now`, Unix time in seconds."""
        for rows, ratio in result.ratios.items():
            self._ratios[rows].set(ratio)
        self._checked_at.set(now)


def _phase(shape: StepShape) -> str:
    return DECODE if shape.is_decode else PREFILL
