"""Names, label values and size of the exposition."""

from enum import StrEnum

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from scheduler_service.metrics import (
    DraftPosition,
    Outcome,
    PreemptionReason,
    PromptSource,
    ReconnectReason,
    RefusalReason,
    RowPhase,
    SchedulerMetrics,
    StepPhase,
    WaitingClass,
)
from scheduler_service.speculation import ProposerKind

LABELS: dict[str, dict[str, type[StrEnum]]] = {
    "isobatch_scheduler_requests": {"outcome": Outcome},
    "isobatch_scheduler_prompt_tokens": {"source": PromptSource},
    "isobatch_scheduler_step_rows": {"phase": RowPhase},
    "isobatch_scheduler_step_phase_seconds": {"phase": StepPhase},
    "isobatch_scheduler_preemptions": {"reason": PreemptionReason},
    "isobatch_scheduler_refusals": {"reason": RefusalReason},
    "isobatch_scheduler_requests_waiting_by_class": {"priority": WaitingClass},
    "isobatch_scheduler_executor_reconnects": {"reason": ReconnectReason},
    "isobatch_scheduler_draft_tokens": {"proposer": ProposerKind, "position": DraftPosition},
    "isobatch_scheduler_accepted_draft_tokens": {
        "proposer": ProposerKind, "position": DraftPosition,
    },
}  # fmt: skip
PLAIN = {
    "isobatch_scheduler_requests_running", "isobatch_scheduler_requests_waiting",
    "isobatch_scheduler_generated_tokens", "isobatch_scheduler_queue_time_seconds",
    "isobatch_scheduler_time_to_first_token_seconds",
    "isobatch_scheduler_inter_token_latency_seconds",
    "isobatch_scheduler_request_duration_seconds", "isobatch_scheduler_build_info",
    "isobatch_scheduler_step_wall_seconds", "isobatch_scheduler_last_step_timestamp_seconds",
    "isobatch_scheduler_executor_connected", "isobatch_scheduler_trace_bytes",
    "isobatch_scheduler_steps_ahead", "isobatch_scheduler_vain_rows",
    "isobatch_scheduler_waiting_tokens", "isobatch_scheduler_streams_paused",
    "isobatch_scheduler_step_predicted_seconds", "isobatch_scheduler_step_measured_seconds",
    "isobatch_scheduler_step_bound_seconds",
}  # fmt: skip


def _exposition() -> str:
    registry = prometheus_client.CollectorRegistry()
    metrics = SchedulerMetrics(registry, "1.2")
    metrics.set_build_info("cpu", "0.1")
    metrics.for_model("toy")
    return prometheus_client.generate_latest(registry).decode()


def test_every_label_value_exists_from_the_start_and_is_in_its_enum() -> None:
    families = {family.name: family for family in text_string_to_metric_families(_exposition())}
    assert set(families) == set(LABELS) | PLAIN
    for name, labels in LABELS.items():
        for label, enum in labels.items():
            found = {sample.labels[label] for sample in families[name].samples}
            assert found == {each.value for each in enum}
    without_model = {"isobatch_scheduler_build_info", "isobatch_scheduler_executor_connected"}
    for name in set(families) - without_model:
        assert {sample.labels["model"] for sample in families[name].samples} == {"toy"}


def test_a_scrape_stays_small() -> None:
    """A scrape holds the interpreter for each line; the process's own values add some."""
    assert len(_exposition().splitlines()) <= 450


def test_one_build_is_shown() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = SchedulerMetrics(registry, "1.2")
    metrics.set_build_info("cpu", "0.1")
    metrics.set_build_info("metal", "0.2")
    (family,) = (f for f in registry.collect() if f.name == "isobatch_scheduler_build_info")
    (sample,) = family.samples
    assert sample.labels == {"version": "1.2", "device": "metal", "mlx_version": "0.2"}


def test_drafts_are_counted_by_their_place() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = SchedulerMetrics(registry, "1.2").for_model("toy")
    metrics.count_drafts(ProposerKind.LOOKUP, 11, 6)
    metrics.count_drafts(ProposerKind.LOOKUP, 2, 0)

    def counts(name: str) -> dict[str, float]:
        labels = {"model": "toy", "proposer": "lookup"}
        found = {
            each.value: registry.get_sample_value(
                f"isobatch_scheduler_{name}_total", {**labels, "position": each}
            )
            for each in DraftPosition
        }
        return {position: value for position, value in found.items() if value}

    assert counts("draft_tokens") == {"1": 2, "2": 2, "3": 1, "4": 1, "5-8": 4, "9+": 3}
    assert counts("accepted_draft_tokens") == {"1": 1, "2": 1, "3": 1, "4": 1, "5-8": 2}
