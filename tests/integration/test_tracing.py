"""Spans of requests and steps, with OpenTelemetry's own exporters; off, and without the extra."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest

from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service import server, span_setup
from scheduler_service.core import TokenRowBatch
from scheduler_service.errors import ConfigurationError
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.spans import Spans
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, collect, running, until

pytest.importorskip(
    "opentelemetry.sdk", reason="the extra isobatch[otel] (requirements/otel.txt) is not installed"
)
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as collector_pb,
)
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2_grpc as collector_grpc,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

from scheduler_service.otel import OtelSpans

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
METADATA = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"), ("x-bin", b"\xff"))
FOUR = {"max_tokens": 4, "ignore_eos": True}
SECRET = "one two three"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of schedulers go that are made in the test; every step is one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(server, "open_spans", lambda *_: OtelSpans(provider, 1, time.monotonic))
    return exporter


async def _span(memory: InMemorySpanExporter, name: str) -> ReadableSpan:
    """Return the first span of a name, once it has ended."""

    def found() -> list[ReadableSpan]:
        return [each for each in memory.get_finished_spans() if each.name == name]

    async def holds() -> bool:
        return bool(found())

    await until(holds)
    return found()[0]


def _attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return dict(span.attributes or {})


def _call(harness: Harness, **fields: Any) -> Any:
    return harness.stub.Generate(pb.GenerateRequest(**fields), metadata=METADATA)


async def test_a_request_is_a_span_with_its_phases(memory: InMemorySpanExporter) -> None:
    async with running() as harness:
        output = await collect(_call(harness, text=SECRET, request_id="r1", stopping=FOUR))
        root = await _span(memory, "generate")
    assert root.parent is not None
    assert (root.context.trace_id, root.parent.span_id) == (TRACE, PARENT)
    assert root.kind.name == "SERVER"
    assert _attributes(root) == {
        "gen_ai.operation.name": "generate",
        "gen_ai.request.model": "toy",
        "gen_ai.usage.input_tokens": output.finished.usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "isobatch.numeric_class": output.accepted.numeric_class,
        "isobatch.request_id": "r1",
        "isobatch.cached_tokens": 0,
        "isobatch.preemptions": 0,
    }
    children = [
        each for each in memory.get_finished_spans()
        if each.parent is not None and each.parent.span_id == root.context.span_id
    ]  # fmt: skip
    assert [each.name for each in children] == ["queue", "prefill", "decode", "finish"]
    borders = [root.start_time, *(each.end_time for each in children)]
    assert borders == [*(each.start_time for each in children), root.end_time]
    assert None not in borders
    assert abs(root.start_time / 1e9 - time.time()) < 3600  # type: ignore[operator]
    everything = "".join(each.to_json() for each in memory.get_finished_spans())
    assert "two" not in everything


async def test_a_step_is_linked_to_its_requests(memory: InMemorySpanExporter) -> None:
    async with running() as harness:
        await collect(_call(harness, text=SECRET, stopping=FOUR))
        root = await _span(memory, "generate")
        steps = [each for each in memory.get_finished_spans() if each.name == "step"]
    assert [_attributes(each)["isobatch.step_id"] for each in steps][:2] == [1, 2]
    assert steps[0].parent is None
    assert [link.context.span_id for link in steps[0].links] == [root.context.span_id]
    attributes = _attributes(steps[0])
    num_prompt_tokens = _attributes(root)["gen_ai.usage.input_tokens"]
    assert (attributes["isobatch.rows"], attributes["isobatch.tokens"]) == (1, num_prompt_tokens)
    assert attributes["isobatch.forward_seconds"] >= 0


def test_some_steps_are_kept() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    times = PhaseTimes(*(float(second) for second, _ in enumerate(dataclasses.fields(PhaseTimes))))
    for every, expected in ((0, []), (3, [3, 6])):
        kept = OtelSpans(provider, every, time.monotonic)
        for step_id in range(1, 8):
            batch = TokenRowBatch(step_id, "m", ())
            kept.step(batch, times, 0.1)
        found = [_attributes(each)["isobatch.step_id"] for each in exporter.get_finished_spans()]
        assert found == expected


async def test_requests_that_fail(memory: InMemorySpanExporter) -> None:
    fake = FakeExecutor()
    async with running(fake, max_num_seqs=1, max_num_waiting=1) as harness:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(_call(harness, text="x", sampling={"temperature": -1.0}))
        refused = await _span(memory, "generate")
        assert _attributes(refused)["error.type"] == "INVALID_PARAMETER"
        assert refused.status.status_code.name == "ERROR"
        memory.clear()
        call = _call(harness, text=SECRET, stopping={"max_tokens": 400, "ignore_eos": True})
        await call.read()
        call.cancel()
        left = await _span(memory, "generate")
        assert _attributes(left)["gen_ai.response.finish_reasons"] == ("cancelled",)
        await harness.wait_idle()
        memory.clear()
        fake.poison_token = fake.model.vocab_size - 1
        prompt = {"token_ids": {"ids": [fake.poison_token]}}
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(_call(harness, **prompt))
        failed = await _span(memory, "generate")
        assert _attributes(failed)["error.type"] == "REQUEST_FAILED"
        names = {each.name for each in memory.get_finished_spans()}
        assert "finish" not in names


class _Collector(collector_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[collector_pb.ExportTraceServiceRequest] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.requests.append(request)
        return collector_pb.ExportTraceServiceResponse()


@pytest.mark.parametrize("how", ["flag", "variables"])
async def test_spans_reach_a_collector_when_the_service_ends(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, receiver = _Collector(), grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, receiver
    )
    endpoint = f"http://127.0.0.1:{receiver.add_insecure_port('127.0.0.1:0')}"
    await receiver.start()
    settings: dict[str, Any] = {}
    if how == "flag":
        settings = {"otlp_endpoint": endpoint}
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    try:
        async with running(**settings) as harness:
            await collect(_call(harness, text=SECRET, stopping=FOUR))
        (resource,) = [each for request in collector.requests for each in request.resource_spans]
    finally:
        await receiver.stop(None)
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "finish", "generate", "prefill", "queue"]
    values = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert values["service.name"] == ("isobatch-scheduler" if how == "flag" else "mine")


async def test_nothing_is_made_when_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    async with running() as harness:
        served = harness.server.engine.served
        assert served is not None
        assert served.loop._counter._on_step is None


def _opened(endpoint: str = "", **environ: str) -> Spans | None:
    return span_setup.open_spans(endpoint, 0, "1", time.monotonic, environ)


@pytest.mark.parametrize(
    "more",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
async def test_variables_that_mean_no_collector_of_ours(more: dict[str, str]) -> None:
    assert _opened(**{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **more}) is None


def _without_the_extra(monkeypatch: pytest.MonkeyPatch, gone: Sequence[str]) -> None:
    monkeypatch.delitem(sys.modules, "scheduler_service.otel", raising=False)
    monkeypatch.delattr("scheduler_service.otel", raising=False)
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_the_extra(monkeypatch, ["opentelemetry", "opentelemetry.sdk"])
    with pytest.raises(ConfigurationError, match=r"pip install 'isobatch\[otel\]'"):
        _opened("http://127.0.0.1:4317")
    assert _opened(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4317") is None
    assert _opened() is None


async def test_close_ends_soon_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler_service import otel

    monkeypatch.setattr(otel, "_CLOSE_SECONDS", 0.05)
    opened = _opened("http://127.0.0.1:9")
    assert opened is not None
    opened.refuse((), time.monotonic(), "m", "X")
    await asyncio.to_thread(opened.close)
