"""Metrics of the draft model, read from its own counts when the page is asked for.

| name                                             | type    | labels              |
|--------------------------------------------------|---------|---------------------|
| isobatch_executor_draft_requests_total           | counter | model               |
| isobatch_executor_draft_passes_total             | counter | model               |
| isobatch_executor_draft_model_tokens_total       | counter | model, kind         |
| isobatch_executor_draft_seconds_total            | counter | model               |
| isobatch_executor_draft_troubles_total           | counter | model, kind         |

`model` is the draft model. Tokens are known ones that it caught up with, or drafted ones. Troubles
are rows for which its cache had no room and sequences for which it cannot draft any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from executor_service.drafting.drafter import DraftCounts

_NAME: Final = "isobatch_executor_draft_"


class DraftCollector(Collector):
    """Shows the counts of one draft model."""

    def __init__(self, registry: CollectorRegistry, model_id: str, counts: DraftCounts) -> None:
        self._model_id = model_id
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the families; numbers are single reads of the engine thread's integers."""
        counts = self._counts
        yield self._counter("requests", "Requests for drafts.", {"": counts.requests})
        yield self._counter("passes", "Passes of the draft model.", {"": counts.passes})
        yield self._counter(
            "model_tokens",
            "Tokens of the draft model.",
            {"caught_up": counts.tokens_caught_up, "drafted": counts.tokens_drafted},
        )
        yield self._counter(
            "seconds", "Time of the draft model's passes.", {"": counts.nanoseconds * 1e-9}
        )
        yield self._counter(
            "troubles",
            "Rows without room in the cache; sequences that drafting ended for.",
            {"no_capacity": counts.rows_without_capacity, "failed": counts.failed_sequences},
        )

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
        has_kinds = "" not in values
        labels = ("model", "kind") if has_kinds else ("model",)
        family = CounterMetricFamily(f"{_NAME}{name}", text, labels=labels)
        for kind, value in values.items():
            family.add_metric((self._model_id, kind) if has_kinds else (self._model_id,), value)
        return family
