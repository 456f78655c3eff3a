"""How requests and the service itself end: cancel, disconnect, deadline, drain, slow readers."""

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service.client import IsobatchError
from scheduler_service.client._errors import error_from_rpc
from scheduler_service.config import SchedulerConfig
from scheduler_service.core import SamplingParams
from scheduler_service.errors import ConfigurationError
from scheduler_service.server import SchedulerServer
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import collect, running, socket_folder, until
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel

FIFTY = sampling_pb2.StoppingParams(max_tokens=50, ignore_eos=True)
LONG = sampling_pb2.StoppingParams(max_tokens=400, ignore_eos=True)
ENDLESS = sampling_pb2.StoppingParams(max_tokens=100_000, ignore_eos=True)
MODEL = ToyModel(vocab_size())


async def _first_token(call: Any) -> None:
    events = aiter(call)
    assert (await anext(events)).WhichOneof("event") == "accepted"
    assert (await anext(events)).WhichOneof("event") == "delta"


async def test_cancel_ends_a_stream_with_its_tokens() -> None:
    async with running(FakeExecutor(step_seconds=0.001)) as harness:
        call = harness.generate(token_ids=pb.TokenIds(ids=[9]), request_id="c", stopping=LONG)
        output = asyncio.ensure_future(collect(call))
        await until(lambda: _has_steps(harness.executor, 6))
        reply = await harness.stub.Cancel(pb.CancelRequest(request_id="c"))
        assert reply.was_live
        done = await output
        assert done.finished.reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert done.token_ids == MODEL.solo_run([9], SamplingParams(), len(done.token_ids))
        assert not (await harness.stub.Cancel(pb.CancelRequest(request_id="c"))).was_live
        await harness.wait_idle()
        assert harness.metric("requests_total", outcome="cancelled") == 1


async def _has_steps(executor: FakeExecutor, count: int) -> bool:
    return len(executor.steps) >= count


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with running(FakeExecutor(step_seconds=0.001)) as harness:
        call = harness.generate(text="leaving", stopping=LONG)
        await _first_token(call)
        call.cancel()
        await harness.wait_idle()
        assert harness.metric("requests_total", outcome="cancelled") == 1


async def test_a_waiting_client_that_leaves_is_forgotten() -> None:
    async with running(FakeExecutor(step_seconds=0.001), max_num_seqs=1) as harness:
        first = harness.generate(text="first", stopping=LONG)
        await _first_token(first)
        waiting = harness.generate(text="waiting", stopping=LONG)
        await anext(aiter(waiting))
        waiting.cancel()
        await until(lambda: _waiting(harness, 0))
        first.cancel()
        await harness.wait_idle()


async def _waiting(harness: Any, count: int) -> bool:
    stats = await harness.stub.GetStats(pb.GetStatsRequest())
    return bool(stats.num_waiting == count)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
async def test_a_deadline_ends_the_call(max_num_seqs: int) -> None:
    """Running or waiting."""
    async with running(FakeExecutor(step_seconds=0.002), max_num_seqs=max_num_seqs) as harness:
        first = harness.generate(text="first", stopping=LONG)
        await _first_token(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.generate(timeout=0.6, text="late", stopping=LONG))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        first.cancel()
        await harness.wait_idle()
        assert harness.metric("requests_total", outcome="deadline") == 1


async def test_a_slow_reader_holds_nobody_up_and_gets_everything() -> None:
    async with running() as harness:
        prompt = pb.TokenIds(ids=[20, 21])
        slow = harness.generate(token_ids=prompt, stopping=LONG)
        await _first_token(slow)
        for _ in range(3):
            await harness.complete(text="quick", stopping=FIFTY)
        output = MODEL.solo_run([20, 21], SamplingParams(), 400)
        rest = [event async for event in slow]
        count = rest[-1].finished.usage.num_generated_tokens
        assert count == 400
        deltas = [event.delta for event in rest[:-1]]
        assert all(
            list(d.token_ids) == output[d.start_index : d.start_index + len(d.token_ids)]
            for d in deltas
        )
        assert deltas[-1].start_index + len(deltas[-1].token_ids) == 400


async def test_coalescing_merges_all_but_the_first_token() -> None:
    async with running(FakeExecutor(step_seconds=0.004)) as harness:
        stopping = sampling_pb2.StoppingParams(max_tokens=60, ignore_eos=True)
        fields: dict[str, Any] = {"token_ids": pb.TokenIds(ids=[9]), "stopping": stopping}
        plain = await harness.complete(**fields)
        merged = await harness.complete(coalesce_ms=50, **fields)
        assert merged.token_ids == plain.token_ids
        assert merged.text == plain.text
        assert 2 * merged.num_deltas < plain.num_deltas
        call = harness.generate(coalesce_ms=50, **fields)
        events = aiter(call)
        await anext(events)
        assert len((await anext(events)).delta.token_ids) == 1
        call.cancel()
        await harness.wait_idle()


async def test_draining_finishes_live_streams_and_removes_the_socket() -> None:
    executor = FakeExecutor(step_seconds=0.002)
    with socket_folder() as folder:
        socket_path = folder / "s.sock"
        config = SchedulerConfig(
            listen=f"unix:{socket_path}", executor=f"unix:{folder}/x.sock", metrics_port=0,
            drain_seconds=10.0,
        )  # fmt: skip
        server = SchedulerServer(config)
        async with (
            executor.serving(config.executor),
            grpc.aio.insecure_channel(config.listen) as channel,
        ):
            async with server.running():
                await until(lambda: _is_connected(server))
                call = pb_grpc.SchedulerServiceStub(channel).Generate(
                    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9]), stopping=FIFTY)
                )
                await _first_token(call)
                rest = asyncio.ensure_future(_rest(call))
            events = await rest
            assert events[-1].finished.usage.num_generated_tokens == 50
            assert not socket_path.exists()


@contextlib.asynccontextmanager
async def _streaming(drain_seconds: float) -> AsyncIterator[tuple[Any, Any]]:
    """A service that drains as soon as the block begins; its methods, and a call without end."""
    executor = FakeExecutor(step_seconds=0.01)
    with socket_folder() as folder:
        config = SchedulerConfig(
            listen=f"unix:{folder}/s.sock", executor=f"unix:{folder}/x.sock", metrics_port=0,
            drain_seconds=drain_seconds,
        )  # fmt: skip
        server = SchedulerServer(config)
        async with (
            executor.serving(config.executor),
            grpc.aio.insecure_channel(config.listen) as channel,
        ):
            stub = pb_grpc.SchedulerServiceStub(channel)
            is_streaming = asyncio.Event()

            async def serve() -> None:
                async with server.running():
                    await is_streaming.wait()

            serving = asyncio.ensure_future(serve())
            await until(lambda: _is_connected(server))
            call = stub.Generate(
                pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=[9]), stopping=ENDLESS, request_id="live"
                )
            )
            await _first_token(call)
            is_streaming.set()
            await until(lambda: _is_draining(server))
            yield stub, call
            await serving


async def test_an_answer_that_outlasts_the_drain_hears_why() -> None:
    """In words of the service, not of gRPC."""
    async with _streaming(drain_seconds=0.2) as (_, call):
        error = await _error(call)
    assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
    assert error.message == (
        "[scheduler] the service is shutting down: an answer must end within 0.2 s, "
        "got one that takes longer"
    )


async def test_a_service_that_drains_still_answers() -> None:
    """A new request is refused with a reason, and a live one can be cancelled."""
    async with _streaming(drain_seconds=60.0) as (stub, call):
        error = await _error(stub.Generate(pb.GenerateRequest(text="x")))
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
        assert (await stub.GetStats(pb.GetStatsRequest())).num_running == 1
        assert (await stub.Cancel(pb.CancelRequest(request_id="live"))).was_live
        assert (await _rest(call))[-1].HasField("finished")


async def _is_draining(server: SchedulerServer) -> bool:
    return server.engine.is_draining


async def _error(call: Any) -> IsobatchError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _rest(call)
    return error_from_rpc(caught.value)


async def _is_connected(server: SchedulerServer) -> bool:
    return server.engine.is_connected


async def _rest(call: Any) -> list[Any]:
    return [event async for event in call]


async def test_a_draining_service_says_so() -> None:
    async with running() as harness:
        harness.server.engine.is_draining = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.generate(text="x"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in str(caught.value.details())


async def test_the_socket_is_private_and_not_stolen() -> None:
    async with running() as harness:
        assert stat.S_IMODE(harness.socket.stat().st_mode) == 0o600
        config = SchedulerConfig(
            listen=f"unix:{harness.socket}", executor=harness.executor_address, metrics_port=0
        )
        with pytest.raises(ConfigurationError, match="another process serves"):
            async with SchedulerServer(config).running():
                pass
        await harness.complete(
            text="still here", stopping=sampling_pb2.StoppingParams(max_tokens=2)
        )


async def test_a_socket_that_a_dead_process_left_is_replaced() -> None:
    with socket_folder() as folder:
        path = folder / "s.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        assert path.exists()
        async with running(listen=f"unix:{path}") as harness:
            assert (await harness.stub.GetStats(pb.GetStatsRequest())).executor_connected


async def test_a_folder_that_others_can_enter_is_refused() -> None:
    with socket_folder() as folder:
        folder.chmod(0o755)
        config = SchedulerConfig(
            listen=f"unix:{folder}/s.sock", executor=f"unix:{folder}/x.sock", metrics_port=0
        )
        with pytest.raises(ConfigurationError, match="0700"):
            async with SchedulerServer(config).running():
                pass


async def test_health_and_reflection_answer() -> None:
    async with running() as harness:
        assert await harness.health() == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(harness.channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        await call.done_writing()
        names = {each.name for each in reply.list_services_response.service}
        assert "isobatch.scheduler.v1.SchedulerService" in names
        assert "grpc.health.v1.Health" in names


async def test_loopback_tcp_works() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with running(listen=f"127.0.0.1:{port}") as harness:
        await harness.complete(text="x", stopping=sampling_pb2.StoppingParams(max_tokens=2))
