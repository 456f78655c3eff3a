"""Request ids beside latencies: only where asked for, only in OpenMetrics, and never as labels."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request

from tests.support.scheduler_harness import running

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "request_duration")


def _page(port: int, accept: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


async def _pages(*, metrics_exemplars: bool, request_ids: list[str]) -> tuple[str, str]:
    """Serve requests with these ids, then return the page as OpenMetrics and as plain text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with running(metrics_port=port, metrics_exemplars=metrics_exemplars) as harness:
        for request_id in request_ids:
            await harness.complete(
                text="one two", request_id=request_id,
                stopping={"max_tokens": 4, "ignore_eos": True},
            )  # fmt: skip
        with harness.server.metrics_port():
            return (
                await asyncio.to_thread(_page, port, OPEN_METRICS),
                await asyncio.to_thread(_page, port, "text/plain"),
            )


async def test_latencies_name_a_request_each() -> None:
    # Quotes, and more characters than the format has room for.
    odd, long = 'a"b\\c', "x" * 128
    rich, plain = await _pages(metrics_exemplars=True, request_ids=["r1", long, odd])
    for name in HISTOGRAMS:
        pattern = rf'_{name}_seconds_bucket\{{[^}}]*\}} \d+\.0 # \{{request_id="([^}}]*)"\}} '
        found = set(re.findall(pattern, rich))
        assert found, name
        assert found <= {"r1", 'a\\"b\\\\c'}
    assert rich.count(" # {") == len(re.findall(r"_bucket\{.* # \{request_id=", rich))
    assert "request_id" not in plain


async def test_off_by_default() -> None:
    for page in await _pages(metrics_exemplars=False, request_ids=["r1"]):
        assert "isobatch_scheduler_time_to_first_token_seconds_bucket" in page
        assert "request_id" not in page
