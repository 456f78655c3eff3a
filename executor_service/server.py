"""Wires the process together: socket, services, engine thread, metrics page, signals."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from executor_service import logs, socket_paths
from executor_service.disk_cache.tier import CLOSE_SECONDS
from executor_service.draft_metrics import DraftCollector
from executor_service.engine.engine import build_engine
from executor_service.engine.memory import give_back
from executor_service.engine_thread import EngineThread
from executor_service.errors import ConfigError, DrainingError, StartError
from executor_service.host import Host
from executor_service.kv_cache.sizing import memory_mb_for
from executor_service.metrics import Metrics
from executor_service.prefix_metrics import PrefixCacheCollector
from executor_service.servicer import ExecutorServicer
from executor_service.servicer_stream import MAX_MESSAGE_BYTES
from executor_service.speed_watch import SpeedWatch
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from isobatch_kernels.kernel_policy import minds_company

if TYPE_CHECKING:
    from pathlib import Path

    from executor_service.config import ExecutorConfig
    from executor_service.engine.engine import BackendFactory, Engine, SelfTest
    from executor_service.models.registry import ModelLocation

EXIT_OK: Final = 0
EXIT_CONFIG: Final = 78

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
# A session that asks nothing for this long is not in the middle of anything.
IDLE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.02
_STOP_GRACE_SECONDS: Final = 1.0
# launchd and systemd, as `isobatch service install` sets them up, kill after 30 s.
_STOP_SECONDS: Final = 28.0
_LEAST_DISK_SECONDS: Final = 1.0
_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
_LOG = logs.get_logger(__name__)


def disk_seconds(elapsed_seconds: float, *, is_hurried: bool = False) -> float:
    """Return how long the disk may take at the end, so long after the process was told to stop.

    `is_hurried` says that it was told twice.
    """
    if is_hurried:
        return _LEAST_DISK_SECONDS
    return min(CLOSE_SECONDS, max(_LEAST_DISK_SECONDS, _STOP_SECONDS - elapsed_seconds))


class Server:
    """One executor process."""

    def __init__(
        self,
        config: ExecutorConfig,
        location: ModelLocation,
        create_backend: BackendFactory,
        self_test: SelfTest,
    ) -> None:
        self._config = config
        self._location = location
        self._create_backend = create_backend
        self._self_test = self_test
        self._thread = EngineThread()
        self._host = Host(config, self._thread)
        self._health = health.aio.HealthServicer()
        self._stop_requests = 0
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal asks to stop; return the exit code."""
        # Before anything can be seen from outside: whoever sees it may send a signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop)
        path = socket_paths.socket_path(self._config.listen)
        try:
            socket_paths.prepare(path)
        except StartError as error:
            _LOG.error("cannot start", error=str(error))
            return EXIT_CONFIG
        # Loading takes longest, so it begins first.
        self._thread.start()
        started = time.monotonic()
        loading = asyncio.ensure_future(self._host.run(self._load))
        try:
            server = await self._listen(path)
            try:
                return await self._serve(loading, started)
            finally:
                await server.stop(_STOP_GRACE_SECONDS)
        except StartError as error:
            _LOG.error("cannot start", error=str(error))
            return EXIT_CONFIG
        finally:
            if loading.done():
                await asyncio.to_thread(self._thread.stop)
            loading.cancel()

    @property
    def is_engine_running(self) -> bool:
        """True while the engine thread is alive: after `run`, when it was stopped while loading."""
        return self._thread.is_alive

    def request_stop(self) -> None:
        """Ask to stop: the first time after the live session, the second time at once."""
        self._stop_requests += 1
        self._stop.set()
        if self._stop_requests == 2:
            _LOG.warning(
                "stopping at once: told to stop again",
                session=self._host.gate.live is not None,
            )

    async def _listen(self, path: Path) -> grpc.aio.Server:
        server = grpc.aio.server(options=_OPTIONS)
        pb_grpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(self._host), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            # Imported here, while the model loads: it takes as long as the rest of gRPC.
            from grpc_reflection.v1alpha import reflection

            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        await self._set_health(is_serving=False)
        try:
            server.add_insecure_port(self._config.listen)
            socket_paths.make_private(path)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"[listen] the socket must be free, got {error}: {path}") from error
        await server.start()
        return server

    async def _serve(self, loading: asyncio.Future[Engine], started: float) -> int:
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            first: set[asyncio.Future[Any]] = {loading, stopping}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not loading.done():
            return EXIT_OK  # asked to stop while loading, which cannot be interrupted
        engine = loading.result()
        with _MetricsPage(self._config, engine) as metrics:
            await self._serve_engine(engine, metrics, time.monotonic() - started)
        return EXIT_OK

    def _load(self) -> Engine:
        """Build the engine; on the engine thread."""
        engine = build_engine(self._config, self._location, self._create_backend, self._self_test)
        give_back()
        return engine

    async def _serve_engine(self, engine: Engine, metrics: Metrics, seconds: float) -> None:
        self._host.set_ready(engine, metrics)
        await self._set_health(is_serving=True)
        model, build = engine.capabilities.model, engine.capabilities.build
        _LOG.info(
            "serving",
            listen=self._config.listen,
            model=model.model_id,
            numeric_class=model.numeric_class,
            unit=build.unit,
            threads=build.num_threads,
            blocks=model.num_blocks,
            load_seconds=round(seconds, 3),
        )
        context_length = engine.capabilities.limits.context_length
        if (held := model.num_blocks * model.block_size) < context_length:
            # By default it is as large as most need, which for long contexts may be less.
            log = _LOG.warning if self._config.kv_memory_mb else _LOG.info
            log(
                "the key/value cache holds less than one sequence of the model's whole context",
                tokens=held,
                context_length=context_length,
                kv_memory_mb_needed=memory_mb_for(
                    context_length, model.block_size, engine.kv_pool_bytes // model.num_blocks
                ),
            )
        if minds_company(self._config.policy, build.backend):
            _LOG.warning(
                "this kernel policy is for comparison: other requests may change results",
                policy=self._config.policy,
            )
        watching = asyncio.ensure_future(SpeedWatch(self._host, engine, metrics).run())
        await self._stop.wait()
        watching.cancel()
        stopped = time.monotonic()
        await self._drain(engine)
        seconds = disk_seconds(time.monotonic() - stopped, is_hurried=self._stop_requests > 1)
        await asyncio.to_thread(self._thread.stop, lambda: engine.close(seconds))

    async def _set_health(self, *, is_serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def _drain(self, engine: Engine) -> None:
        """Wait for the live session to end: its scheduler finishes what it has."""
        _LOG.info("stopping", session=self._host.gate.live is not None)
        self._host.is_draining = True
        await self._health.enter_graceful_shutdown()
        deadline = time.monotonic() + self._config.drain_seconds

        def is_busy() -> bool:
            live, now = self._host.gate.live, time.monotonic()
            return (
                live is not None
                and self._stop_requests < 2
                and now < deadline
                and engine.session.num_sequences > 0
                and now - live.last_request < IDLE_SECONDS
            )

        while is_busy():  # noqa: ASYNC110 - idleness is no event
            await asyncio.sleep(_POLL_SECONDS)
        self._host.gate.end(
            DrainingError("[executor] the executor stops, got a session that is still open")
        )


class _MetricsPage:
    """Serves /metrics on the loopback interface for the time of the block."""

    def __init__(self, config: ExecutorConfig, engine: Engine) -> None:
        self._port = config.metrics_port
        self._metrics = Metrics(engine.capabilities, engine.kv_pool_bytes, engine.weight_bytes)
        model_id = engine.capabilities.model.model_id
        PrefixCacheCollector(self._metrics.registry, model_id, engine.prefixes)
        if engine.draft is not None:
            draft = engine.draft
            DraftCollector(self._metrics.registry, draft.description.model_id, draft.drafter.counts)

    def __enter__(self) -> Metrics:
        if self._port:
            try:
                self._server, self._page_thread = start_http_server(
                    self._port, addr="127.0.0.1", registry=self._metrics.registry
                )
            except OSError as error:
                raise ConfigError(
                    f"[config] metrics_port must be free, got {self._port}: {error.strerror}"
                ) from error
        return self._metrics

    def __exit__(self, *_: object) -> None:
        if self._port:
            self._server.shutdown()
            self._server.server_close()
            self._page_thread.join()
