"""Metrics of the prefix cache: documented names, zero from the start, the cache's own counts."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, generate_latest

from executor_service import prefix_metrics
from executor_service.kv_cache.prefix_index import PrefixCounts


def _samples(counts: PrefixCounts) -> dict[str, float]:
    registry = CollectorRegistry()
    prefix_metrics.PrefixCacheCollector(registry, "toy", counts)
    page = generate_latest(registry).decode()
    names = set(re.findall(r"^# TYPE (isobatch_\w+)", page, re.MULTILINE))
    assert names == set(re.findall(r"isobatch_executor_\w+", prefix_metrics.__doc__ or ""))
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {
        line.rpartition(" ")[0].removeprefix("isobatch_executor_prefix_cache_"): float(
            line.rpartition(" ")[2]
        )
        for line in lines
    }


def test_an_idle_cache_shows_zeros() -> None:
    samples = _samples(PrefixCounts())
    assert len(samples) == 6
    assert set(samples.values()) == {0}


def test_shows_what_the_cache_counted() -> None:
    assert _samples(PrefixCounts(1, 2, 3, 4, 5, 6)) == {
        'lookups_total{model="toy",result="hit"}': 1,
        'lookups_total{model="toy",result="miss"}': 2,
        'tokens_total{model="toy",result="hit"}': 3,
        'tokens_total{model="toy",result="miss"}': 4,
        'evictions_total{model="toy",tier="memory"}': 5,
        'blocks{model="toy",tier="memory"}': 6,
    }
