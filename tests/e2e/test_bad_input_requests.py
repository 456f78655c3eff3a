"""Bad requests to a real pair of processes, while eight healthy streams beside them notice nothing.

Every case states its gRPC code, the reason and the fields of its details. After each test the
scheduler is idle, every cache block is free, and descriptors and threads are as before.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from tests.support.bad_requests import EMPTY, BadRequest, biases, numbers, out_of_range
from tests.support.bystanders import connected, refused, run
from tests.support.healthy_pair import HealthyPair
from tests.support.tiny_pair import SHAPE

CODE = grpc.StatusCode
VOCABULARY, CONTEXT = SHAPE.vocab_size, SHAPE.context_length
GENERATE = "/isobatch.scheduler.v1.SchedulerService/Generate"


async def _check_refusals(stub: Any, cases: list[BadRequest]) -> None:
    for request, field in cases:
        found = await refused(stub.Generate(pb.GenerateRequest(**request), timeout=60.0))
        assert found.code is CODE.INVALID_ARGUMENT, request
        assert found.reason in ("INVALID_PARAMETER", "INVALID_PROMPT"), request
        assert found.fields == (field,), request
        assert found.message.startswith("["), request
        assert ", got " in found.message, request


async def test_b31_an_empty_prompt_of_any_kind_is_refused(stub: Any) -> None:
    await _check_refusals(stub, EMPTY)


async def test_values_out_of_range_are_refused_by_field(stub: Any) -> None:
    await _check_refusals(stub, out_of_range(VOCABULARY))


async def test_b20_numbers_that_are_none_or_negative_are_refused_by_field(stub: Any) -> None:
    await _check_refusals(stub, numbers())


async def test_b17_biases_out_of_range_are_refused_by_id(stub: Any) -> None:
    await _check_refusals(stub, biases(VOCABULARY))
    # In range, a bias decides the token; the last id of the vocabulary has one as well.
    for token_id in (7, VOCABULARY - 1):
        output = await run(
            stub,
            token_ids=pb.TokenIds(ids=[50, 206]),
            sampling=sampling_pb2.SamplingParams(logit_bias={token_id: 100.0}),
            stopping=sampling_pb2.StoppingParams(max_tokens=3, ignore_eos=True),
        )
        assert output.token_ids == (token_id,) * 3


async def test_b34_a_prompt_beyond_the_context_is_refused_with_the_limits(stub: Any) -> None:
    for num_tokens in (CONTEXT, CONTEXT + 1, 2 * CONTEXT):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[50] * num_tokens))
        found = await refused(stub.Generate(request, timeout=60.0))
        assert (found.code, found.reason) == (CODE.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
        assert found.fields == ("prompt",)
        assert found.metadata == {
            "num_prompt_tokens": str(num_tokens),
            "context_length": str(CONTEXT),
            "pool_capacity": "4096",
        }
    megabyte = pb.GenerateRequest(text="hello world " * 80_000)
    found = await refused(stub.Generate(megabyte, timeout=60.0))
    assert found.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_top_k_above_the_vocabulary_keeps_everything(stub: Any) -> None:
    """Documented: it is not an error, and equals no top-k."""
    answers = []
    for top_k in (0, VOCABULARY, VOCABULARY + 1, 2**32 - 1):
        output = await run(
            stub,
            token_ids=pb.TokenIds(ids=[50, 206, 282]),
            sampling=sampling_pb2.SamplingParams(temperature=1.1, seed=5, top_k=top_k),
            stopping=sampling_pb2.StoppingParams(max_tokens=8, ignore_eos=True),
        )
        answers.append(output.answer)
    assert answers == [answers[0]] * 4


async def test_b52_an_unknown_model_is_not_found(stub: Any) -> None:
    for model in ("gpt", "\u65e5" * 5000):
        for call in (
            stub.Generate(pb.GenerateRequest(text="x", model=model)),
            stub.Tokenize(pb.TokenizeRequest(text="x", model=model)),
        ):
            found = await refused(call)
            assert (found.code, found.reason) == (CODE.NOT_FOUND, "UNKNOWN_MODEL")


async def test_an_id_that_is_live_is_refused_and_can_be_used_again(stub: Any) -> None:
    stopping = sampling_pb2.StoppingParams(max_tokens=60, ignore_eos=True)
    first = stub.Generate(pb.GenerateRequest(text="x", request_id="twin", stopping=stopping))
    await anext(aiter(first))
    found = await refused(stub.Generate(pb.GenerateRequest(text="y", request_id="twin")))
    assert (found.code, found.reason) == (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert found.fields == ("request_id",)
    reply = await stub.Cancel(pb.CancelRequest(request_id="twin"))
    assert reply.was_live
    assert [event async for event in first][-1].finished.reason == (
        sampling_pb2.FINISH_REASON_CANCELLED
    )
    assert not (await stub.Cancel(pb.CancelRequest(request_id="twin"))).was_live
    await run(stub, text="x", request_id="twin", stopping=sampling_pb2.StoppingParams(max_tokens=1))


async def test_b46_a_message_over_the_size_limit_is_refused_by_its_size(
    stub: Any, running: HealthyPair
) -> None:
    """One of 4 MiB is read and judged; far beyond that the answer is gRPC's own."""
    big = ("grpc.max_send_message_length", 32 << 20)
    async with connected(running.address, big) as wide:
        for size, code, reason in (
            (4_194_304, CODE.INVALID_ARGUMENT, "INVALID_PARAMETER"),
            (4_194_305, CODE.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE"),
            (16 << 20, CODE.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE"),
            ((16 << 20) + 1, CODE.RESOURCE_EXHAUSTED, ""),
        ):
            # One field: a byte of tag, four of length, and spaces.
            request = pb.GenerateRequest(request_id=" " * (size - 5))
            assert request.ByteSize() == size
            found = await refused(wide.Generate(request, timeout=60.0))
            assert (found.code, found.reason) == (code, reason), size
            if reason == "MESSAGE_TOO_LARGE":
                rule = f"[grpc] a request must have at most 4194304 bytes, got {size}"
                assert found.message == rule


async def test_bytes_that_are_no_message_end_their_call(running: HealthyPair, stub: Any) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        for raw in (b"\xff" * 20, b"\x1a\x02\xc3\x28", b"\x0a\xff\xff\xff\xff\x0f"):
            method: Any = channel.unary_stream(GENERATE)
            found = await refused(method(raw, timeout=60.0))
            assert (found.code, found.reason) == (CODE.INVALID_ARGUMENT, "INVALID_MESSAGE")
            single: Any = channel.unary_unary(GENERATE.replace("Generate", "Tokenize"))
            found = await refused(single(raw, timeout=60.0))
            assert (found.code, found.reason) == (CODE.INVALID_ARGUMENT, "INVALID_MESSAGE")
        unknown: Any = channel.unary_unary(GENERATE + "More")
        assert (await refused(unknown(b"", timeout=60.0))).code is CODE.UNIMPLEMENTED


async def test_a_burst_of_calls_gets_our_answer_and_not_that_of_grpc(stub: Any) -> None:
    """gRPC cancels some of more than a thousand calls at once, without a word, unless told."""
    empty = pb.GenerateRequest()
    found = await asyncio.gather(*(refused(stub.Generate(empty)) for _ in range(2000)))
    assert {each.code for each in found} == {CODE.INVALID_ARGUMENT}


async def test_a_deadline_that_has_passed_ends_the_call(stub: Any) -> None:
    """Or refuses it at once, where the queue alone takes longer."""
    for seconds in (0.0, 0.001, 0.05):
        stopping = sampling_pb2.StoppingParams(max_tokens=2000, ignore_eos=True)
        call = stub.Generate(pb.GenerateRequest(text="x", stopping=stopping), timeout=seconds)
        found = await refused(call)
        assert found.code is CODE.DEADLINE_EXCEEDED or found.reason == "DEADLINE_UNREACHABLE"


async def test_clients_that_never_read_hold_nobody_up(running: HealthyPair, stub: Any) -> None:
    """What they do not read waits in their own outbox; leaving gives everything back."""
    request: dict[str, Any] = {
        "token_ids": pb.TokenIds(ids=[50, 206, 282]),
        "stopping": sampling_pb2.StoppingParams(max_tokens=600, ignore_eos=True),
        "return_logits_digests": True,
    }
    expected = (await run(stub, **request)).answer
    async with connected(running.address, ("grpc.http2.lookahead_bytes", 1)) as other:
        calls = [other.Generate(pb.GenerateRequest(**request)) for _ in range(4)]
        readers = [aiter(call) for call in calls]
        for reader in readers:
            assert (await anext(reader)).WhichOneof("event") == "accepted"
        # As long again as their whole output: by now it waits for them.
        assert (await run(stub, **request)).answer == expected
        for call in calls[1:]:
            call.cancel()
        ids: list[int] = []
        text = ""
        async for event in readers[0]:
            ids += event.delta.token_ids
            text += event.delta.text + event.finished.text
        assert (tuple(ids), text) == expected
