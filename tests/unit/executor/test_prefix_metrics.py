"""Metrics of the prefix cache: documented names, zero from the start, the cache's own counts."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from executor_service import prefix_metrics
from executor_service.disk_cache.tier import DiskCounts
from executor_service.engine.prefix_cache import PrefixCache
from executor_service.kv_cache.chain import Chains
from executor_service.kv_cache.prefix_index import PrefixCounts, PrefixIndex
from tests.support.disk_blocks import IDENTITY, Blocks, disk_tier


def _samples(prefixes: PrefixCache) -> dict[str, float]:
    registry = CollectorRegistry()
    prefix_metrics.PrefixCacheCollector(registry, "toy", prefixes)
    page = generate_latest(registry).decode()
    names = set(re.findall(r"^# TYPE (isobatch_\w+)", page, re.MULTILINE))
    assert names == set(re.findall(r"isobatch_executor_\w+", prefix_metrics.__doc__ or ""))
    samples = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name.removeprefix("isobatch_executor_prefix_")] = float(value)
    return samples


def test_no_cache_shows_zeros() -> None:
    samples = _samples(PrefixCache(None, None))
    assert len(samples) == 15
    assert set(samples.values()) == {0}


def test_shows_what_the_cache_counted(tmp_path: Path) -> None:
    index, tier = PrefixIndex(Chains(IDENTITY)), disk_tier(tmp_path, Blocks())
    tier.close()
    index.counts = PrefixCounts(1, 2, 3, 4, 5, 6, 7)
    tier.folder.num_records, tier.folder.num_evicted = 8, 9
    tier.counts = DiskCounts(10, 11, 12, 13, 14)
    tier.is_paused = True
    assert _samples(PrefixCache(index, tier)) == {
        'cache_lookups_total{model="toy",result="hit"}': 1,
        'cache_lookups_total{model="toy",result="miss"}': 2,
        'cache_tokens_total{model="toy",result="memory"}': 3,
        'cache_tokens_total{model="toy",result="disk"}': 4,
        'cache_tokens_total{model="toy",result="miss"}': 5,
        'cache_evictions_total{model="toy",tier="memory"}': 6,
        'cache_blocks{model="toy",tier="memory"}': 7,
        'cache_blocks{model="toy",tier="disk"}': 8,
        'cache_evictions_total{model="toy",tier="disk"}': 9,
        'disk_events_total{event="written",model="toy"}': 10,
        'disk_events_total{event="dropped",model="toy"}': 11,
        'disk_events_total{event="damaged",model="toy"}': 12,
        'disk_events_total{event="failed",model="toy"}': 13,
        'disk_events_total{event="slow",model="toy"}': 14,
        'disk_paused{model="toy"}': 1,
    }
