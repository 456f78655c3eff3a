"""An in-process SchedulerService on a Unix socket, whose answers the test writes.

Unless told otherwise it answers like a well-behaved server: Accepted, one token a message,
Finished. Token `i` of an answer has id `100 + i` and text `w<i> `.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from isobatch.scheduler.v1 import sampling_pb2, scheduler_service_pb2, scheduler_service_pb2_grpc

Script = Callable[
    [scheduler_service_pb2.GenerateRequest, grpc.ServicerContext],
    Iterator[scheduler_service_pb2.GenerateResponse],
]

DEFAULT_MAX_TOKENS = 5
DRAWN_SEED = 4711


def accepted(
    request: scheduler_service_pb2.GenerateRequest,
) -> scheduler_service_pb2.GenerateResponse:
    """Return the first event of an answer."""
    seed = request.sampling.seed if request.sampling.HasField("seed") else DRAWN_SEED
    return scheduler_service_pb2.GenerateResponse(
        accepted=scheduler_service_pb2.Accepted(
            request_id=request.request_id,
            model=request.model or "toy",
            num_prompt_tokens=3,
            seed=seed,
            max_tokens=request.stopping.max_tokens or DEFAULT_MAX_TOKENS,
            numeric_class="X1",
        )
    )


def delta(start_index: int, count: int = 1) -> scheduler_service_pb2.GenerateResponse:
    """Return `count` tokens, the first of which has index `start_index`."""
    indices = range(start_index, start_index + count)
    return scheduler_service_pb2.GenerateResponse(
        delta=scheduler_service_pb2.TokenDelta(
            start_index=start_index,
            token_ids=[100 + index for index in indices],
            text="".join(f"w{index} " for index in indices),
        )
    )


def finished(
    num_tokens: int,
    reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_LENGTH,
    **fields: Any,
) -> scheduler_service_pb2.GenerateResponse:
    """Return the last event of an answer."""
    return scheduler_service_pb2.GenerateResponse(
        finished=scheduler_service_pb2.Finished(
            reason=reason,
            usage=scheduler_service_pb2.Usage(
                num_prompt_tokens=3, num_cached_tokens=2, num_generated_tokens=num_tokens
            ),
            timings=scheduler_service_pb2.RequestTimings(
                queue_ns=1_000_000, time_to_first_token_ns=20_000_000, total_ns=420_000_000
            ),
            **fields,
        )
    )


def answer(
    request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[scheduler_service_pb2.GenerateResponse]:
    """Answer like a well-behaved server."""
    del context
    yield accepted(request)
    count = request.stopping.max_tokens or DEFAULT_MAX_TOKENS
    for index in range(count):
        yield delta(index)
    limited = request.stopping.max_tokens
    yield finished(
        count,
        sampling_pb2.FINISH_REASON_LENGTH if limited else sampling_pb2.FINISH_REASON_STOP,
    )


def endless(
    request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[scheduler_service_pb2.GenerateResponse]:
    """Give two tokens, then nothing until the caller leaves."""
    yield accepted(request)
    yield delta(0)
    yield delta(1)
    wait_for_end(context)


def silent(
    request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[scheduler_service_pb2.GenerateResponse]:
    """Accept, then give nothing until the caller leaves."""
    yield accepted(request)
    wait_for_end(context)


def wait_for_end(context: grpc.ServicerContext) -> None:
    """Block until the call ends."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(10.0)


def fail(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message
) -> None:
    """End the call with a status and google.rpc details."""
    packed = []
    for detail in details:
        item = any_pb2.Any()
        item.Pack(detail)
        packed.append(item)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


def error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    """Return the detail that every error of the service carries."""
    return error_details_pb2.ErrorInfo(reason=reason, domain="isobatch", metadata=metadata)


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """Return the detail that says when to come back."""
    return error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(nanos=round(seconds * 1e9))
    )


@contextmanager
def running_fake_scheduler() -> Iterator[FakeScheduler]:
    """Serve a fake in a directory whose path is short enough for a socket."""
    with (
        tempfile.TemporaryDirectory(prefix="isobatch-") as directory,
        FakeScheduler(Path(directory) / "s.sock") as fake,
    ):
        yield fake


class FakeScheduler(scheduler_service_pb2_grpc.SchedulerServiceServicer):
    """The service; `script` answers Generate and may be replaced between calls."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}"
        self.script: Script = answer
        self.context_length = 2048
        self.requests: list[scheduler_service_pb2.GenerateRequest] = []
        self.tokenize_requests: list[scheduler_service_pb2.TokenizeRequest] = []
        self.cancelled_ids: list[str] = []
        self.ended = threading.Semaphore(0)  # released at the end of each Generate call
        self.before_unary: Callable[[grpc.ServicerContext], None] = lambda context: None
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        scheduler_service_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self._server.add_insecure_port(self.address)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(grace=None).wait()

    def Generate(
        self, request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        """Answer by the script."""
        copy = scheduler_service_pb2.GenerateRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        context.add_callback(self.ended.release)
        yield from self.script(request, context)

    def Cancel(
        self, request: scheduler_service_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> scheduler_service_pb2.CancelResponse:
        """Record the id; only `live` is live."""
        self.before_unary(context)
        self.cancelled_ids.append(request.request_id)
        return scheduler_service_pb2.CancelResponse(was_live=request.request_id == "live")

    def ListModels(
        self, request: scheduler_service_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> scheduler_service_pb2.ListModelsResponse:
        """Offer one model."""
        self.before_unary(context)
        return scheduler_service_pb2.ListModelsResponse(
            models=[
                scheduler_service_pb2.ModelInfo(
                    model="toy",
                    architecture="llama",
                    context_length=self.context_length,
                    vocab_size=300,
                    numeric_class="X1",
                    weights_digest="abc123",
                    device="cpu: test",
                    num_parameters=134_515_008,
                    has_chat_template=True,
                )
            ]
        )

    def Tokenize(
        self, request: scheduler_service_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> scheduler_service_pb2.TokenizeResponse:
        """Give the code points of a text; wrap a conversation in angle brackets."""
        self.before_unary(context)
        copy = scheduler_service_pb2.TokenizeRequest()
        copy.CopyFrom(request)
        self.tokenize_requests.append(copy)
        if request.WhichOneof("prompt") == "chat":
            rendered = "".join(f"<{item.role}>{item.content}" for item in request.chat.messages)
        else:
            rendered = ""
        text = rendered or request.text
        return scheduler_service_pb2.TokenizeResponse(
            token_ids=[ord(character) for character in text], rendered=rendered
        )

    def GetStats(
        self, request: scheduler_service_pb2.GetStatsRequest, context: grpc.ServicerContext
    ) -> scheduler_service_pb2.GetStatsResponse:
        """Give distinct counts, so that swapped fields show."""
        self.before_unary(context)
        return scheduler_service_pb2.GetStatsResponse(
            num_running=1,
            num_waiting=2,
            num_steps=3,
            num_generated_tokens=4,
            num_prompt_tokens=5,
            num_preemptions=6,
            num_executor_reconnects=7,
            total_blocks=8,
            free_blocks=9,
            executor_connected=True,
        )
