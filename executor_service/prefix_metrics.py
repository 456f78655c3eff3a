"""Metrics of the prefix cache, read from its own counts when the page is asked for.

| name                                             | type    | labels              |
|--------------------------------------------------|---------|---------------------|
| isobatch_executor_prefix_cache_lookups_total     | counter | model, result       |
| isobatch_executor_prefix_cache_tokens_total      | counter | model, result       |
| isobatch_executor_prefix_cache_evictions_total   | counter | model, tier         |
| isobatch_executor_prefix_cache_blocks            | gauge   | model, tier         |
| isobatch_executor_prefix_disk_events_total       | counter | model, event        |
| isobatch_executor_prefix_disk_paused             | gauge   | model               |

A lookup is an opened sequence that may start from cached positions; its tokens are those that it
may take: from memory, from disk, or missed. A hit rate is a quotient of two rates. Blocks on disk
are those of all processes that share the folder, as this one last saw them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from executor_service.disk_cache.tier import DiskCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from executor_service.engine.prefix_cache import PrefixCache

_NAME: Final = "isobatch_executor_prefix_"


class PrefixCacheCollector(Collector):
    """Shows the counts of one cache."""

    def __init__(self, registry: CollectorRegistry, model_id: str, prefixes: PrefixCache) -> None:
        self._model_id = model_id
        self._prefixes = prefixes
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the families; numbers are single reads of other threads' integers."""
        counts, tier = self._prefixes.counts, self._prefixes.tier
        num_on_disk, num_evicted, disk, is_paused = 0, 0, DiskCounts(), False
        if tier is not None:
            is_paused = tier.is_paused
            num_on_disk, num_evicted = tier.folder.num_records, tier.folder.num_evicted
            disk = tier.counts
        yield self._counter(
            "cache_lookups",
            "Sequences that looked for cached positions.",
            "result",
            {"hit": counts.lookups_hit, "miss": counts.lookups_missed},
        )
        yield self._counter(
            "cache_tokens",
            "Positions that were looked for.",
            "result",
            {
                "memory": counts.tokens_hit,
                "disk": counts.tokens_hit_on_disk,
                "miss": counts.tokens_missed,
            },
        )
        yield self._counter(
            "cache_evictions",
            "Blocks taken out to make room.",
            "tier",
            {"memory": counts.evictions, "disk": num_evicted},
        )
        yield self._counter(
            "disk_events",
            "Blocks written, dropped (queue full), damaged, failed; openings that found it slow.",
            "event",
            {
                "written": disk.written,
                "dropped": disk.dropped,
                "damaged": disk.damaged,
                "failed": disk.failed,
                "slow": disk.slow,
            },
        )
        blocks = GaugeMetricFamily(
            f"{_NAME}cache_blocks", "Blocks that can be found.", labels=("model", "tier")
        )
        for name, count in (("memory", counts.indexed), ("disk", num_on_disk)):
            blocks.add_metric((self._model_id, name), count)
        yield blocks
        paused = GaugeMetricFamily(
            f"{_NAME}disk_paused",
            "1 while the disk takes no blocks, as when it is full.",
            labels=("model",),
        )
        paused.add_metric((self._model_id,), is_paused)
        yield paused

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{_NAME}{name}", text, labels=("model", label))
        for value, count in values.items():
            family.add_metric((self._model_id, value), count)
        return family
