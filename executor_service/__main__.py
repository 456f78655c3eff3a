"""`python -m executor_service`: reads the configuration, finds the model, serves.

Exit codes: 0 stopped by a signal, 78 configuration or model cannot be used, 1 anything else.

What takes time to import is imported inside `main`, where a signal is already heard.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from executor_service import early_stop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from executor_service import config as configuration
    from executor_service.engine.engine import BackendFactory, SelfTest

EXIT_OK: Final = 0
EXIT_CONFIG: Final = 78
# The engine thread comes back from native code many times a second and then waits for the event
# loop's thread to give the interpreter up; CPython's own 5 ms would be as long as a step.
SWITCH_SECONDS: Final = 0.0005


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the executor and return its exit code."""
    with early_stop.quiet_leaving():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    import asyncio
    import json
    import logging

    from executor_service import config as configuration
    from executor_service.errors import StartError
    from executor_service.models.registry import locate
    from executor_service.settings import as_json

    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        loaded = configuration.read(arguments, os.environ)
        config = configuration.ExecutorConfig(**loaded.values)
        if loaded.is_shown:
            print(json.dumps(as_json(loaded)))
            return EXIT_OK
        _configure_logs(config)
        # Kernels first: who cannot compute should not be sent to fetch a model.
        _warn_of_old_kernels()
        create_backend, self_test = kernels(config)
        location = locate(config.model, config.model_id or None)
        if config.draft_model:
            locate(config.draft_model)
    except StartError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    from executor_service.server import Server

    is_loading = False

    async def serve() -> int:
        nonlocal is_loading
        server = Server(config, location, create_backend, self_test)
        code = await server.run()
        is_loading = server.is_engine_running
        return code

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        code = runner.run(serve())
    if is_loading:
        # Native code that loads a model cannot be interrupted, and an interpreter that shuts down
        # under it aborts the process. Everything else has ended: leave without shutting down.
        logging.shutdown()
        os._exit(code)
    return code


def _configure_logs(config: configuration.ExecutorConfig) -> None:
    from executor_service import logs
    from executor_service.errors import ConfigError

    try:
        logs.configure(config.log_level, config.log_format, file=config.log_file)
    except OSError as error:
        raise ConfigError(
            f"[config] log_file must be writable, got {error.strerror}: {config.log_file}"
        ) from error


def _warn_of_old_kernels() -> None:
    """Say so when the native module is not of the sources beside it, before it fails in its way."""
    from executor_service import logs
    from isobatch_kernels.source_digest import staleness

    if words := staleness():
        logs.get_logger(__name__).warning(words)


def kernels(config: configuration.ExecutorConfig) -> tuple[BackendFactory, SelfTest]:
    """Return the maker of backends and the account of its self-test; raises StartError."""
    from executor_service.engine.kernels import backend_error, create_backend, self_test_of
    from executor_service.errors import StartError

    error = backend_error(config.backend, config.unit)
    if error is not None:
        raise StartError(f"[kernels] {error}")
    return create_backend, self_test_of(config.backend, config.unit)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's maker of event loops where it is installed; it costs less per message."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
