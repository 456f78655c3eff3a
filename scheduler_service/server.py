"""Composition root: wires engine, gRPC server, health, metrics port and signals."""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service import listening, logs, message_size, supervised
from scheduler_service.config import SchedulerConfig, socket_path
from scheduler_service.engine import Engine
from scheduler_service.errors import ConfigurationError, NotServingError
from scheduler_service.executor_client import ExecutorClient
from scheduler_service.interceptor import ErrorInterceptor
from scheduler_service.live_calls import LiveCalls
from scheduler_service.metrics import SchedulerMetrics
from scheduler_service.servicer import SchedulerServicer
from scheduler_service.span_setup import open_spans
from scheduler_service.tracing.folder import TraceFolder

_LOG = logs.get_logger(__name__)
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
# After the drain, for the last words of calls that had to be ended.
_LAST_WORDS_SECONDS = 2.0
_HURRIED_WORDS_SECONDS = 0.5
# Beyond so many calls that nobody has taken up, gRPC by itself answers some of them with CANCELLED
# and no word; its own bound of 1000 lies below the waiting queue's, whose answer is a better one.
_MAX_PENDING_CALLS = 16_384
# Above the limit of a request, so that the answer to one that is larger is ours. Beyond this it is
# gRPC's, RESOURCE_EXHAUSTED without a reason.
_MAX_READ_BYTES = 4 * message_size.MAX_REQUEST_BYTES
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_READ_BYTES),
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
]
_TCP_OPTIONS = [
    # Clients send a keepalive every 30 s.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
]


def version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("isobatch")
    except metadata.PackageNotFoundError:
        return "unknown"


class SchedulerServer:
    """One scheduler process's worth of service; several may live in one test process."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Wire everything up; nothing is started or bound."""
        self._config = config
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = SchedulerMetrics(
            self.registry, version(), has_exemplars=config.metrics_exemplars
        )
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans = open_spans(
            config.otlp_endpoint, config.otlp_step_every, version(), time.monotonic, os.environ
        )
        self._calls = LiveCalls()
        self._hurry = asyncio.Event()
        self._traces: TraceFolder | None = None
        if config.trace_dir:
            self._traces = TraceFolder(Path(config.trace_dir), config.trace_dir_mb * 10**6)
        self.engine = Engine(
            config,
            ExecutorClient(config.executor, config.step_timeout_seconds),
            self.metrics,
            self._show_serving,
            spans=self._spans,
        )
        self._options = _OPTIONS + ([] if socket_path(config.listen) else _TCP_OPTIONS)

    def _show_serving(self, is_serving: bool) -> None:
        self.metrics.executor_connected.set(is_serving)
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        task = asyncio.ensure_future(self._set_health(status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, status: int) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Serve inside the context; leaving it drains.

        Gives the engine's task, which ends only by a bug. Raises ConfigurationError when an
        address cannot be bound.
        """
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(SERVICE_NAME)], options=self._options
        )
        pb_grpc.add_SchedulerServiceServicer_to_server(
            SchedulerServicer(
                self.engine,
                self.metrics,
                self._calls,
                log_prompts=self._config.log_prompts,
                spans=self._spans,
                traces=self._traces,
            ),
            server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = listening.bind(server, self._config.listen)
        await server.start()
        _LOG.info("serving", address=address, version=version())
        engine_task = asyncio.create_task(self.engine.run(), name="engine")
        try:
            yield engine_task
        finally:
            await self._drain()
            await server.stop(
                _HURRIED_WORDS_SECONDS if self._hurry.is_set() else _LAST_WORDS_SECONDS
            )
            engine_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await engine_task
            await asyncio.gather(*self._tasks)
            if self._traces is not None:
                await self._traces.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def hurry(self) -> None:
        """End live requests now instead of draining to the end. Safe to call twice."""
        self._hurry.set()

    async def _drain(self) -> None:
        """Refuse new requests, and let live ones end; those that take too long hear why.

        gRPC still answers meanwhile, so that a refusal has its reason and Cancel its effect.
        """
        self.engine.is_draining = True
        await self._health.enter_graceful_shutdown()
        seconds = self._config.drain_seconds
        _LOG.info("draining", requests=len(self._calls), grace_seconds=seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._calls_over_or_hurried()
        except TimeoutError:
            _LOG.warning("drain_too_short", requests=len(self._calls))
            self.engine.give_up(
                lambda: NotServingError(
                    f"[scheduler] the service is shutting down: an answer must end within "
                    f"{seconds:g} s, got one that takes longer",
                    reason="DRAINING",
                )
            )
        else:
            if calls := len(self._calls):
                _LOG.warning("drain_cut_short", requests=calls, why="told to stop again")
                self.engine.give_up(
                    lambda: NotServingError(
                        "[scheduler] the service is shutting down at once: it was told to "
                        "stop again",
                        reason="DRAINING",
                    )
                )

    async def _calls_over_or_hurried(self) -> None:
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._calls.all_over()),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    @contextlib.contextmanager
    def metrics_port(self) -> Iterator[None]:
        """Serve /metrics on 127.0.0.1 inside the context, if so configured."""
        port = self._config.metrics_port
        if port == 0:
            yield
            return
        prometheus_client.ProcessCollector(registry=self.registry)
        try:
            server, thread = prometheus_client.start_http_server(
                port, addr="127.0.0.1", registry=self.registry
            )
        except OSError as error:
            raise ConfigurationError(
                f"[server] the metrics port must be free, got {port}: {error.strerror} "
                "(--metrics-port names another, 0 serves none)"
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


async def serve(config: SchedulerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain; raises what ends the engine.

    A second signal cuts the drain short.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    scheduler: SchedulerServer | None = None

    def on_signal() -> None:
        if stop.is_set() and scheduler is not None:
            scheduler.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    listening.check_free(config.listen)
    scheduler = SchedulerServer(config)
    with (
        scheduler.metrics_port(),
        supervised.hearing(scheduler.engine.give_executor_up, os.environ),
    ):
        async with scheduler.running() as engine_task:
            # What is there now stays for good. A full collection that looked at it again would
            # hold a step up for tens of milliseconds.
            gc.collect()
            gc.freeze()
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait(
                {stopping, engine_task}, return_when=asyncio.FIRST_COMPLETED
            )
            stopping.cancel()
            if engine_task in done:
                await engine_task
