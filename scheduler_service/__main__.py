"""Entry point of the scheduler process.

Exit status: 0 after a signal, 78 for a configuration error, 1 for anything else.

What takes time to import is imported inside `main`, where a signal is already heard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler_service import early_stop

if TYPE_CHECKING:
    from scheduler_service import config

EXIT_CONFIGURATION = 78


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scheduler; return the exit status."""
    with early_stop.quiet_leaving():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    import json

    from scheduler_service import config, logs
    from scheduler_service.errors import ConfigurationError
    from scheduler_service.settings import as_json

    try:
        loaded = config.read(arguments, os.environ)
        settings = config.SchedulerConfig(**loaded.values)
        if loaded.is_shown:
            print(json.dumps(as_json(loaded)))
            return 0
        _configure_logs(settings)
        _run(settings)
    except ConfigurationError as error:
        print(f"isobatch-scheduler: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except Exception:
        logs.get_logger(__name__).exception("scheduler_failed")
        return 1
    return 0


def _configure_logs(settings: config.SchedulerConfig) -> None:
    from scheduler_service import logs
    from scheduler_service.errors import ConfigurationError

    try:
        logs.configure(settings.log_level, settings.log_format, file=settings.log_file)
    except OSError as error:
        raise ConfigurationError(
            f"[config] log_file must be writable, got {error.strerror}: {settings.log_file}"
        ) from error


def _run(settings: config.SchedulerConfig) -> None:
    import asyncio
    import importlib

    from scheduler_service import server

    try:
        # Optional: saves a quarter of the processor time of streaming.
        new_event_loop = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(server.serve(settings))


if __name__ == "__main__":
    sys.exit(main())
