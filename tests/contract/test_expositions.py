"""Both processes' pages as Prometheus reads them: promtool finds nothing to complain about."""

from __future__ import annotations

import shutil
import subprocess

import prometheus_client
import pytest

from executor_service.engine.capabilities import (
    Build,
    Capabilities,
    ModelDescription,
    SelfTestResult,
)
from executor_service.engine.prefix_cache import PrefixCache
from executor_service.engine.weight_bytes import WeightBytes
from executor_service.metrics import Metrics
from executor_service.models.checkpoint import TokenizerData
from executor_service.prefix_metrics import PrefixCacheCollector
from scheduler_service.metrics import SchedulerMetrics
from tests.support.profiles import full_profile
from tests.support.steps import LIMITS

# A scrape holds the interpreter for about 9 microseconds a line.
MOST_LINES = 500


def scheduler_page() -> str:
    """What a scheduler with one model shows, the values of its process included."""
    registry = prometheus_client.CollectorRegistry()
    metrics = SchedulerMetrics(registry, "1.2")
    metrics.set_build_info("cpu", "0.1")
    metrics.for_model("toy")
    prometheus_client.ProcessCollector(registry=registry)
    return prometheus_client.generate_latest(registry).decode()


def executor_page() -> str:
    """What an executor shows."""
    capabilities = Capabilities(
        model=ModelDescription("toy", "llama", "X1", "00", 10, "toy.gguf", 16, 20),
        tokenizer=TokenizerData(b"{}", "", (), None, False, ()),
        limits=LIMITS,
        build=Build("0.1", "cpu", "a processor", "vnni", "0.32", 2),
        self_test=SelfTestResult(0, ()),
        profile=full_profile(),
    )
    metrics = Metrics(capabilities, 1, WeightBytes(1, 1))
    PrefixCacheCollector(metrics.registry, "toy", PrefixCache(None, None))
    return prometheus_client.generate_latest(metrics.registry).decode()


PAGES = {"scheduler": scheduler_page, "executor": executor_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name: str) -> None:
    assert len(PAGES[name]().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", PAGES)
def test_promtool_accepts_a_page(name: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=PAGES[name](), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
