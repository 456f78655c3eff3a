"""Every refusal: code, reason and details as the contract says."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.errors import NotServingError
from scheduler_service.interceptor import abort
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, collect, running
from tests.support.tiny_tokenizer import vocab_size

CODE = grpc.StatusCode
SHORT = sampling_pb2.StoppingParams(max_tokens=2)


@dataclass
class Refusal:
    """A failed call, taken apart."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    retry_seconds: float | None
    resource: str


async def refusal(call: Any) -> Refusal:
    answer = collect(call) if hasattr(call, "__aiter__") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry, resource = error_details_pb2.RetryInfo(), error_details_pb2.ResourceInfo()
    for detail in status.details:
        assert any(detail.Unpack(each) for each in (info, request, retry, resource))
    assert info.domain == "isobatch"
    delay = retry.retry_delay
    return Refusal(
        caught.value.code(), caught.value.details() or "", info.reason, dict(info.metadata),
        [each.field for each in request.field_violations],
        delay.seconds + delay.nanos / 1e9 if retry.ByteSize() else None, resource.resource_name,
    )  # fmt: skip


def _sampling(**fields: Any) -> dict[str, Any]:
    return {"text": "x", "sampling": sampling_pb2.SamplingParams(**fields)}


def _stopping(**fields: Any) -> dict[str, Any]:
    return {"text": "x", "stopping": sampling_pb2.StoppingParams(**fields)}


def _chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns])}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"text": ""}, "text"),
    ({"token_ids": pb.TokenIds()}, "token_ids"),
    ({"token_ids": pb.TokenIds(ids=[3, vocab_size()])}, "token_ids"),
    ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "token_ids"),
    (_chat(), "chat"),
    (_chat(("a role", "x")), "chat"),
    (_sampling(temperature=-0.5), "sampling.temperature"),
    (_sampling(temperature=math.nan), "sampling.temperature"),
    (_sampling(temperature=math.inf), "sampling.temperature"),
    (_sampling(top_p=1.5), "sampling.top_p"),
    (_sampling(top_p=math.nan), "sampling.top_p"),
    (_sampling(top_p=-0.1), "sampling.top_p"),
    (_sampling(min_p=1.5), "sampling.min_p"),
    (_sampling(min_p=math.nan), "sampling.min_p"),
    (_sampling(logit_bias={3: 101.0}), "sampling.logit_bias[3]"),
    (_sampling(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
    (_sampling(logit_bias={vocab_size(): 1.0}), f"sampling.logit_bias[{vocab_size()}]"),
    (_stopping(max_tokens=0), "stopping.max_tokens"),
    (_stopping(max_tokens=-3), "stopping.max_tokens"),
    (_stopping(stop=["a", ""]), "stopping.stop[1]"),
    (_stopping(stop=["a" * 1025]), "stopping.stop[0]"),
    (_stopping(stop=["a"] * 17), "stopping.stop"),
    (_stopping(stop_token_ids=[vocab_size()]), "stopping.stop_token_ids[0]"),
    ({"text": "x", "coalesce_ms": 51}, "coalesce_ms"),
    ({"text": "x", "request_id": "i" * 129}, "request_id"),
]


async def test_bad_parameters_name_their_field() -> None:
    async with running() as harness:
        for fields, name in INVALID:
            found = await refusal(harness.generate(**fields))
            assert (found.code, found.fields) == (CODE.INVALID_ARGUMENT, [name]), fields
            assert found.reason in ("INVALID_PARAMETER", "INVALID_PROMPT")
            assert found.message.startswith("[")
            assert ", got " in found.message
        assert harness.metric("requests_total", outcome="rejected") == len(INVALID)
        assert not harness.executor.steps


async def test_a_prompt_beyond_the_context_names_the_limits() -> None:
    async with running(FakeExecutor(context_length=16)) as harness:
        found = await refusal(harness.generate(token_ids=pb.TokenIds(ids=[3] * 16)))
        assert (found.code, found.reason) == (CODE.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
        assert found.metadata["context_length"] == "16"
        assert found.metadata["num_prompt_tokens"] == "16"
        await harness.complete(token_ids=pb.TokenIds(ids=[3] * 15))


async def test_an_unknown_model() -> None:
    async with running() as harness:
        calls: list[Any] = [
            harness.generate(text="x", model="other"),
            harness.stub.Tokenize(pb.TokenizeRequest(text="x", model="other")),
        ]
        for call in calls:
            found = await refusal(call)
            assert (found.code, found.reason) == (CODE.NOT_FOUND, "UNKNOWN_MODEL")
            assert found.resource == "other"
        await harness.complete(text="x", model="toy", stopping=SHORT)


async def _hold(harness: Harness, **fields: Any) -> Any:
    """Start a request that does not end by itself soon; return its call once accepted."""
    call = harness.generate(
        text="hold",
        stopping=sampling_pb2.StoppingParams(max_tokens=400, ignore_eos=True),
        **fields,
    )
    await anext(aiter(call))
    return call


async def test_a_duplicate_id_of_a_live_request() -> None:
    async with running(FakeExecutor(step_seconds=0.002)) as harness:
        call = await _hold(harness, request_id="twin")
        found = await refusal(harness.generate(text="x", request_id="twin"))
        assert (found.code, found.reason) == (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        call.cancel()
        await harness.wait_idle()
        await harness.complete(text="x", request_id="twin", stopping=SHORT)


async def test_a_refusal_whose_client_has_left_is_no_failure() -> None:
    """gRPC cannot send the status then, and its log would show a traceback."""

    class Gone:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    with pytest.raises(asyncio.CancelledError):
        await abort(Gone(), NotServingError("[scheduler] no"))  # type: ignore[arg-type]


async def test_a_full_queue_asks_to_come_back() -> None:
    async with running(
        FakeExecutor(step_seconds=0.002), max_num_seqs=1, max_num_waiting=2
    ) as harness:
        first = await _hold(harness)
        # Only once the first holds cache does it no longer count as waiting.
        await anext(aiter(first))
        calls = [await _hold(harness) for _ in range(2)]
        found = await refusal(harness.generate(text="one too many"))
        assert (found.code, found.reason) == (CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert found.retry_seconds is not None
        assert 0.05 <= found.retry_seconds <= 60.0
        assert found.metadata["max_num_waiting"] == "2"
        for call in [first, *calls]:
            call.cancel()
        await harness.wait_idle()


async def test_a_row_that_is_not_finite_ends_its_request_alone() -> None:
    executor = FakeExecutor(poison_token=77)
    async with running(executor) as harness:
        stopping = sampling_pb2.StoppingParams(max_tokens=20, ignore_eos=True)
        good = [
            harness.complete(
                token_ids=pb.TokenIds(ids=[first, 4]),
                stopping=stopping,
                sampling=sampling_pb2.SamplingParams(logit_bias={77: -100.0}),
            )
            for first in range(10, 14)
        ]
        bad = refusal(harness.generate(token_ids=pb.TokenIds(ids=[5, 77]), stopping=stopping))
        found, outputs = await asyncio.gather(bad, asyncio.gather(*good))
        assert found.code is CODE.INTERNAL
        assert "layer 3, attention" in found.message
        assert [len(output.token_ids) for output in outputs] == [20] * 4
        await harness.wait_idle()


async def test_a_bug_gives_an_id_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as harness:

        def broken(name: str) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(harness.server.engine, "model", broken)
        calls: list[Any] = [
            harness.generate(text="x"),
            harness.stub.Tokenize(pb.TokenizeRequest(text="x")),
        ]
        for call in calls:
            found = await refusal(call)
            assert (found.code, found.reason) == (CODE.INTERNAL, "INTERNAL")
            assert found.metadata["error_id"] in found.message
            assert "secret" not in found.message


async def test_unset_parameters_are_not_zero() -> None:
    """A top_p of 0 keeps one token; an unset one keeps all."""
    async with running() as harness:
        fields: dict[str, Any] = {
            "token_ids": pb.TokenIds(ids=[8, 9]),
            "stopping": sampling_pb2.StoppingParams(max_tokens=10, ignore_eos=True),
        }
        greedy = await harness.complete(**fields)
        narrow = await harness.complete(
            sampling=sampling_pb2.SamplingParams(temperature=3.0, top_p=0.0, seed=1), **fields
        )
        wide = await harness.complete(
            sampling=sampling_pb2.SamplingParams(temperature=3.0, seed=1), **fields
        )
        assert narrow.token_ids == greedy.token_ids != wide.token_ids
