"""The executor's contract over a real Unix socket with grpc.aio, on toy kernels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_service import server, session_gate
from isobatch.executor.v1 import capabilities_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch.executor.v1 import provenance_pb2 as provenance_pb
from isobatch.executor.v1 import token_rows_pb2 as rows_pb
from scheduler_service.executor_client import ExecutorClient, ExecutorUnavailableError
from tests.support.executor_harness import (
    Harness,
    SessionClient,
    ready,
    reason_of,
    running,
    step_message,
)
from tests.support.fake_backend import toy_logits
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tokenizer_document

SHAPE = TinyShape(num_layers=1, vocab_size=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(path, SHAPE, Storage(4))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))


@pytest.fixture
async def harness(model: Path) -> AsyncIterator[Harness]:
    async with running(model) as started:
        yield started


@contextlib.asynccontextmanager
async def session(harness: Harness, epoch: int = 1) -> AsyncIterator[SessionClient]:
    async with harness.channel() as channel:
        client = SessionClient(channel)
        await client.start(epoch)
        yield client


def _argmax(*tokens: int) -> int:
    return int(np.argmax(toy_logits(tokens, SHAPE.vocab_size)))


def _ids(raw: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(raw, "<i4")]


async def test_describes_itself(harness: Harness) -> None:
    reply = await ready(harness)
    (described,) = reply.models
    assert described.model_id == "tiny"
    assert described.role == capabilities_pb2.MODEL_ROLE_TARGET
    assert (described.vocab_size, described.context_length) == (64, 128)
    assert described.numeric_class == "X1.1-a12-kvf16-rope00000000"
    assert len(bytes.fromhex(described.weights_digest)) == 32
    assert described.num_blocks == len(harness.backends[0].cache)
    assert reply.supports_step_output_source
    assert reply.max_steps_in_flight == 2
    assert (reply.max_num_seqs, reply.max_num_batched_tokens, reply.max_top_k) == (256, 512, 64)
    assert reply.self_test.state == capabilities_pb2.SELF_TEST_STATE_PASSED


async def test_gives_the_tokenizer(harness: Harness) -> None:
    async with harness.channel() as channel:
        stub = pb_grpc.ExecutorServiceStub(channel)
        reply = await stub.GetTokenizer(pb.GetTokenizerRequest(model_id="tiny"))
        assert json.loads(reply.tokenizer_json) == json.loads(tokenizer_document())
        assert reply.chat_template == CHAT_TEMPLATE
        assert list(reply.eos_token_ids) == [2]
        assert not reply.HasField("bos_token_id")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model_id="other"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert reason_of(raised.value) == "MODEL_NOT_FOUND"


async def test_before_the_model_is_loaded(model: Path) -> None:
    gate = asyncio.Event()
    async with running(model, gate=gate) as harness, harness.channel() as channel:
        stub = pb_grpc.ExecutorServiceStub(channel)
        reply = await stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert (reply.ready, len(reply.models)) == (False, 0)
        assert reply.executor_epoch > 0
        assert reply.self_test.state == capabilities_pb2.SELF_TEST_STATE_RUNNING
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        request = health_pb2.HealthCheckRequest()
        assert (await health.Check(request)).status != serving
        for call in (stub.GetTokenizer(pb.GetTokenizerRequest()), SessionClient(channel).start(1)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(raised.value) == "MODEL_LOADING"
        gate.set()
        after = await ready(harness)
        assert after.executor_epoch == reply.executor_epoch
        service = "isobatch.executor.v1.ExecutorService"
        for each in (request, health_pb2.HealthCheckRequest(service=service)):
            assert (await health.Check(each)).status == serving


async def test_the_socket_is_private(harness: Harness) -> None:
    assert harness.socket.stat().st_mode & 0o777 == 0o600


async def test_steps_give_tokens_and_counts(harness: Harness) -> None:
    async with session(harness) as client:
        opened = await client.open(1, 2)
        assert [each.num_cached_tokens for each in opened.sequences] == [0, 0]
        total = opened.kv_occupancy.total_blocks
        assert opened.kv_occupancy.free_blocks == total
        result = await client.step(step_message(1, [(1, range(20, 40), 0), (2, (7,), 0)]))
        assert result.outcome == rows_pb.STEP_OUTCOME_COMPUTED
        assert _ids(result.argmax_ids) == [_argmax(*range(20, 40)), _argmax(7)]
        assert result.kv_occupancy.free_blocks == total - 3
        timings = result.timings
        assert timings.total_ns >= timings.queue_ns + timings.prepare_ns
        assert timings.forward_ns == 1000
        result = await client.step(
            step_message(2, [(2, (0,), 1)], released_sequence_ids=np.uint64(1).tobytes(),
                         row_token_sources=b"\x02", row_source_steps=np.uint64(1).tobytes(),
                         row_source_wanted=np.int32(1).tobytes())
        )  # fmt: skip
        assert _ids(result.argmax_ids) == [_argmax(7, _argmax(7))]
        # A full block outlives its sequence: it is there for others until its place is needed.
        assert result.kv_occupancy.free_blocks == total - 2
        assert result.kv_occupancy.evictable_blocks == 1
        released = await client.ask(
            release=rows_pb.ReleaseSequences(sequence_ids=np.uint64(2).tobytes())
        )
        assert released.released.kv_occupancy.free_blocks == total - 1


async def test_requests_may_be_sent_ahead(harness: Harness) -> None:
    """Open and Step go out together; answers come in their order."""
    async with session(harness) as client:
        key = rows_pb.SequenceKey(sequence_id=1)
        await client.send(open=rows_pb.OpenSequences(sequences=[rows_pb.OpenSequence(key=key)]))
        await client.send(step=step_message(1, [(1, (5,), 0)]))
        assert (await client.read()).WhichOneof("message") == "opened"
        assert _ids((await client.read()).step_result.argmax_ids) == [_argmax(5)]


async def test_full_logits_on_demand(harness: Harness) -> None:
    async with session(harness) as client:
        await client.open(1)
        await client.step(step_message(1, [(1, (5,), 0)], rows_pb.STATISTIC_FULL_ROW))
        fetch = rows_pb.FetchLogits(step_id=1, wanted_indexes=np.int32(0).tobytes())
        fetched = (await client.ask(fetch_logits=fetch)).logits_fetched
        assert fetched.step_id == 1
        assert fetched.logits.inline == toy_logits((5,), 64).tobytes()


async def test_a_broken_stream_is_taken_up_again(harness: Harness) -> None:
    """The answer is lost with the stream; the repeated step is not computed twice."""
    async with session(harness, epoch=5) as client:
        await client.open(1)
        first = await client.step(step_message(1, [(1, (5, 6), 0)]))
        client.call.cancel()
    runs = harness.backends[0].num_runs
    async with session(harness, epoch=5) as client:
        await client.open(1)
        again = await client.step(step_message(1, [(1, (5, 6), 0)]))
        assert again.argmax_ids == first.argmax_ids
        assert again.executor_epoch == first.executor_epoch
        assert harness.backends[0].num_runs == runs
        result = await client.step(step_message(2, [(1, (7,), 2)]))
        assert _ids(result.argmax_ids) == [_argmax(5, 6, 7)]


@pytest.mark.parametrize("epoch", [5, 6])
async def test_a_newer_session_fences_the_old_one(harness: Harness, epoch: int) -> None:
    async with session(harness, epoch=5) as old:
        await old.open(1)
        async with session(harness, epoch=epoch) as new:
            # The old stream ends by itself, although it asks for nothing.
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(old.read(), 60)
            assert raised.value.code() is grpc.StatusCode.ABORTED
            assert reason_of(raised.value) == "SESSION_FENCED"
            await new.open(1)
            result = await new.step(step_message(1, [(1, (5,), 0)]))
            assert _ids(result.argmax_ids) == [_argmax(5)]


async def test_an_older_session_is_refused_and_disturbs_nobody(harness: Harness) -> None:
    async with session(harness, epoch=5) as live:
        await live.open(1)
        async with harness.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await SessionClient(channel).start(4)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(raised.value) == "STALE_EPOCH"
        result = await live.step(step_message(1, [(1, (5,), 0)]))
        assert _ids(result.argmax_ids) == [_argmax(5)]


async def test_a_replaced_scheduler_comes_back_once_the_other_has_been_gone_for_a_while(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its stream lives or may be resumed, the other one is left alone."""
    old, new = (ExecutorClient(f"unix:{harness.socket}") for _ in range(2))
    first, second = await old.connect(), await new.connect()
    with pytest.raises(ExecutorUnavailableError, match="scheduler_epoch must be at least"):
        await old.connect(first)
    await second.close()
    with pytest.raises(ExecutorUnavailableError, match="scheduler_epoch must be at least"):
        await old.connect(first)
    monkeypatch.setattr(session_gate, "RESUME_SECONDS", 0.0)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ExecutorUnavailableError):
                third = await old.connect(first)
                break
            await asyncio.sleep(0.01)
    assert third.scheduler_epoch > second.scheduler_epoch
    for each in (first, third):
        await each.close()


async def test_a_scheduler_whose_clock_was_set_back_takes_over(harness: Harness) -> None:
    async with session(harness, epoch=2**62):
        client = ExecutorClient(f"unix:{harness.socket}")
        found = await client.connect()
        assert found.scheduler_epoch > 2**62
        await found.close()


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ({"step": step_message(1, [(9, (5,), 0)])}, "FAILED_PRECONDITION", "SEQUENCE_NOT_OPEN"),
        ({"step": step_message(3, [])}, "FAILED_PRECONDITION", "STEP_OUT_OF_ORDER"),
        ({"step": step_message(1, [(1, (64,), 0)])}, "INVALID_ARGUMENT", "INVALID_STEP"),
        ({"step": step_message(1, [(1, (5,), 0)], token_ids=b"1")},
         "INVALID_ARGUMENT", "INVALID_STEP"),
        ({"step": step_message(1, [(1, (5,), 0)], model_id="x")}, "NOT_FOUND", "MODEL_NOT_FOUND"),
        ({"fetch_logits": rows_pb.FetchLogits(step_id=1)},
         "FAILED_PRECONDITION", "LOGITS_NOT_KEPT"),
        ({"start": pb.StartSession(scheduler_epoch=9)}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ],
)  # fmt: skip
async def test_broken_rules_end_the_stream_with_a_reason(
    harness: Harness, message: dict[str, object], code: str, reason: str
) -> None:
    async with session(harness) as client:
        await client.open(1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.ask(**message)
    assert (raised.value.code().name, reason_of(raised.value)) == (code, reason)


async def test_start_comes_first(harness: Harness) -> None:
    async with harness.channel() as channel:
        client = SessionClient(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.open(1)
    assert "the first message must be start, got open" in (raised.value.details() or "")


async def test_an_unexpected_failure_is_internal_and_the_next_session_works(
    harness: Harness,
) -> None:
    harness.backends[0].fail_next = RuntimeError("secret")
    async with session(harness) as client:
        await client.open(1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.step(step_message(1, [(1, (5,), 0)]))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (raised.value.details() or "")
    async with session(harness) as client:
        result = await client.step(step_message(1, [(1, (5,), 0)]))
        assert _ids(result.argmax_ids) == [_argmax(5)]


async def test_a_stop_waits_for_the_live_session(model: Path) -> None:
    async with running(model) as harness, session(harness) as client:
        await client.open(1)
        harness.server.request_stop()
        await asyncio.sleep(0.1)
        async with harness.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await SessionClient(channel).start(2)
            assert reason_of(raised.value) == "DRAINING"
        result = await client.step(step_message(1, [(1, (5,), 0)]))
        assert _ids(result.argmax_ids) == [_argmax(5)]
        await client.ask(release=rows_pb.ReleaseSequences(sequence_ids=np.uint64(1).tobytes()))
        # Nothing is open any more: the executor ends the session by itself.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(client.read(), 60)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert harness.backends[0].is_closed
    assert not harness.socket.exists()


async def test_a_second_stop_ends_the_live_session_and_says_so(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(model, drain_seconds=600.0) as harness, session(harness) as client:
        await client.open(1)
        harness.server.request_stop()
        await client.step(step_message(1, [(1, (5,), 0)]))
        assert "told to stop again" not in caplog.text
        harness.server.request_stop()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            # Sooner than a session that asks nothing counts as idle.
            await asyncio.wait_for(client.read(), server.IDLE_SECONDS / 2)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopping at once: told to stop again" in caplog.text


async def test_provenance_is_told_by_sequence_and_by_handle(harness: Harness) -> None:
    async with session(harness) as client, harness.channel() as channel:
        await client.open(7)
        first = step_message(1, [(7, range(20, 38), 0)], record_provenance=True)
        result = await client.step(first)
        await client.step(step_message(2, [(7, [5], 18)]))
        stub = pb_grpc.ExecutorServiceStub(channel)
        request = provenance_pb.GetProvenanceRequest(
            sequence=rows_pb.SequenceKey(sequence_id=7), include_digests=True
        )
        reply = await stub.GetProvenance(request)
        assert reply.executor_epoch == result.executor_epoch
        assert reply.numeric_class.startswith("X1")
        assert [step.step_id for step in reply.steps] == [1, 2]
        assert [step.num_tokens for step in reply.steps] == [18, 1]
        assert [block.num_positions for block in reply.blocks] == [16, 3]
        positions = np.frombuffer(reply.blocks[1].position_steps, "<i4")
        assert positions.tolist() == [0, 0, 1]
        assert len(reply.blocks[0].position_digests) == 16 * 16
        paths = reply.path_sets[reply.steps[0].path_set].paths
        assert [each.op for each in paths] == [rows_pb.KERNEL_OP_LINEAR]
        by_handle = await stub.GetProvenance(
            provenance_pb.GetProvenanceRequest(handle=result.provenance_handle)
        )
        assert list(by_handle.steps) == list(reply.steps[:1])
        assert not by_handle.blocks
        for wrong, reason in (
            (provenance_pb.GetProvenanceRequest(), "INVALID_REQUEST"),
            (provenance_pb.GetProvenanceRequest(handle=99), "RECORD_NOT_KEPT"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetProvenance(wrong)
            assert reason_of(caught.value) == reason
