"""Metrics of the prefix cache, read from its own counts when the page is asked for.

| name                                             | type    | labels              |
|--------------------------------------------------|---------|---------------------|
| isobatch_executor_prefix_cache_lookups_total     | counter | model, result       |
| isobatch_executor_prefix_cache_tokens_total      | counter | model, result       |
| isobatch_executor_prefix_cache_evictions_total   | counter | model, tier         |
| isobatch_executor_prefix_cache_blocks            | gauge   | model, tier         |

A lookup is an opened sequence that may start from cached positions; its tokens are those that it
may take. A hit rate is a quotient of two rates: tokens of result hit over tokens of all results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from executor_service.kv_cache.prefix_index import PrefixCounts

_NAME = "isobatch_executor_prefix_cache"


class PrefixCacheCollector(Collector):
    """Shows the counts of one cache."""

    def __init__(self, registry: CollectorRegistry, model_id: str, counts: PrefixCounts) -> None:
        self._model_id = model_id
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the families; numbers are single reads of another thread's integers."""
        counts = self._counts
        yield self._counter(
            "lookups",
            "Sequences that looked for cached positions.",
            "result",
            {"hit": counts.lookups_hit, "miss": counts.lookups_missed},
        )
        yield self._counter(
            "tokens",
            "Positions that were looked for.",
            "result",
            {"hit": counts.tokens_hit, "miss": counts.tokens_missed},
        )
        yield self._counter("evictions", "Blocks taken out.", "tier", {"memory": counts.evictions})
        blocks = GaugeMetricFamily(f"{_NAME}_blocks", "Blocks.", labels=("model", "tier"))
        blocks.add_metric((self._model_id, "memory"), counts.indexed)
        yield blocks

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{_NAME}_{name}", text, labels=("model", label))
        for value, count in values.items():
            family.add_metric((self._model_id, value), count)
        return family
