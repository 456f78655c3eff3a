"""What the metrics cost: processor time of one scrape, and of counting one step; and of traces.

Usage: python tests/bench/bench_metrics.py

Processor time of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import prometheus_client  # noqa: E402 - the root comes first

from scheduler_service.core import FinishReason, Request, RequestId, SamplingParams  # noqa: E402
from scheduler_service.metrics import SchedulerMetrics  # noqa: E402
from scheduler_service.phase_times import PhaseTimes  # noqa: E402
from scheduler_service.streams import Ending, TokenStream  # noqa: E402
from scheduler_service.text.detokenizer import Detokenizer  # noqa: E402
from tests.contract.test_expositions import executor_page, scheduler_page  # noqa: E402

REPEATS: Final = 200
# A step of the smallest model on two cores, and the scrape interval of deploy/prometheus.
STEP_SECONDS: Final = 0.01
SCRAPE_SECONDS: Final = 5.0


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median processor time of one call."""
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return statistics.median(times)


def scheduler_step() -> Callable[[], None]:
    """Return what the step loop counts for one step."""
    metrics = SchedulerMetrics(prometheus_client.CollectorRegistry(), "1").for_model("m")
    times = PhaseTimes(0.0, 0.001, 0.0, 0.002, 0.003, 0.009, 0.01)

    def count() -> None:
        for phase, seconds in times.phases(0.005).items():
            metrics.step_phase[phase].observe(seconds)
        metrics.step_wall.inc(0.01)
        metrics.last_step.set(time.time())

    return count


def token(*, has_exemplars: bool) -> Callable[[], object]:
    """Return what is counted for one token of a stream."""
    registry = prometheus_client.CollectorRegistry()
    metrics = SchedulerMetrics(registry, "1", has_exemplars=has_exemplars).for_model("m")

    def count() -> None:
        for _ in range(100):
            metrics.inter_token_latency.observe(0.012, metrics.exemplar("a-request"))

    return count


def request_span() -> Callable[[], object] | None:
    """Return what the spans of one request cost before they are sent; None without the extra."""
    try:
        from opentelemetry.sdk.trace import TracerProvider

        from scheduler_service.otel import OtelSpans
    except ImportError:
        return None
    spans = OtelSpans(TracerProvider(shutdown_on_exit=False), 0, time.monotonic)
    request = Request(RequestId("r"), (1, 2, 3), SamplingParams(), 4, arrival=time.monotonic())
    # No text is made of these tokens.
    stream = TokenStream(request, typing.cast("Detokenizer", None))
    stream.admitted_at = stream.first_token_at = request.arrival
    stream.ending = Ending(FinishReason.LENGTH, "", "", None, request.arrival)
    return lambda: spans.begin(stream, (), "x")()


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, page in (("scheduler", scheduler_page), ("executor", executor_page)):
        lines = len(page().splitlines())
        registry_page = median_seconds(page)
        share = registry_page / SCRAPE_SECONDS
        print(f"{name}: {lines} lines, made and rendered in {registry_page * 1e3:.2f} ms of "
              f"processor time ({share:.3%} of a core each {SCRAPE_SECONDS:g} s)")  # fmt: skip
    step = median_seconds(scheduler_step())
    print(f"scheduler: counting a step takes {step * 1e6:.1f} us "
          f"({step / STEP_SECONDS:.3%} of a step of {STEP_SECONDS * 1e3:g} ms)")  # fmt: skip
    plain, rich = (median_seconds(token(has_exemplars=each)) / 100 for each in (False, True))
    print(f"scheduler: a latency takes {plain * 1e6:.1f} us, with an exemplar {rich * 1e6:.1f} us")
    spans = request_span()
    if spans is None:
        print("scheduler: traces not measured, isobatch[otel] is not installed")
    else:
        print(f"scheduler: the spans of a request take {median_seconds(spans) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
