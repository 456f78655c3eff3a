"""`isobatch serve`: scheduler and executor under one supervisor, for development."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import click

from scheduler_service import runtime_paths, settings
from scheduler_service.cli import children, output
from scheduler_service.cli.failures import EXIT_CONFIGURATION, EXIT_FAILURE, Failure
from scheduler_service.cli.options import EMBEDDED_MODEL
from scheduler_service.cli.readiness import wait_until_serving
from scheduler_service.cli.signals import on_ending_signals
from scheduler_service.cli.supervisor import Supervisor

_NAME_WIDTH: Final = len("scheduler")
_STATS_SECONDS: Final = 2.0
_PORT: Final = click.IntRange(0, 65535)


@click.command("serve")
@click.option("-m", "--model", help=f"Name or path. Default: {EMBEDDED_MODEL}.")
@click.option("--listen", metavar="ADDRESS", help="unix:PATH or HOST:PORT of the scheduler.")
@click.option("--port", type=click.IntRange(1, 65535), help="Short for --listen 127.0.0.1:PORT.")
@click.option("--executor-socket", metavar="PATH", help="Socket between the two services.")
@click.option("--metrics-port", type=_PORT, help="0: off. Default: 9400.")
@click.option("--executor-metrics-port", type=_PORT, help="0: off. Default: 9401.")
@click.option("--kv-memory-mb", type=click.IntRange(1), help="Size of the KV cache.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the executor.")
@click.option(
    "--speculation",
    metavar="KIND",
    help="Who drafts tokens: off, lookup, draft, auto. Default: off.",
)
@click.option(
    "--draft-model", metavar="MODEL", help="Drafts for the model: smollm2-draft, or a path."
)
def command(
    model: str | None,
    listen: str | None,
    port: int | None,
    executor_socket: str | None,
    metrics_port: int | None,
    executor_metrics_port: int | None,
    kv_memory_mb: int | None,
    threads: int | None,
    speculation: str | None,
    draft_model: str | None,
) -> None:
    """Run scheduler and executor until Ctrl-C.

    A service that dies is started again. Ctrl-C lets running answers finish, and says how many; a
    second one does not.
    What no option says comes from variables and the configuration file: isobatch config show.
    """
    if listen is not None and port is not None:
        raise click.UsageError("--port is short for --listen: give one of them")
    if port is not None:
        listen = f"127.0.0.1:{port}"
    socket_path = Path(executor_socket) if executor_socket else runtime_paths.executor_socket()
    executor = runtime_paths.unix_address(socket_path.absolute())
    if listen is None or executor_socket is None:
        runtime_paths.ensure_private_directory(runtime_paths.runtime_directory())
    listen = listen or asked("scheduler", "listen") or runtime_paths.default_scheduler_address()
    model = model or asked("executor", "model") or EMBEDDED_MODEL
    for address in (listen, executor):
        _check_free(address)
    if model == EMBEDDED_MODEL:
        children.pull(model)

    supervisor = Supervisor(_print_line)

    def end(_: int) -> None:
        if supervisor.stopping:
            supervisor.kill()
        else:
            supervisor.stop()
            threading.Thread(target=_say_what_is_left, args=(listen,), daemon=True).start()

    with on_ending_signals(end):
        supervisor.start(
            children.scheduler_child(
                listen=listen,
                executor=executor,
                metrics_port=metrics_port,
                more=() if speculation is None else ("--speculation", speculation),
            )
        )
        supervisor.start(
            children.executor_child(
                model=model,
                listen=executor,
                metrics_port=executor_metrics_port,
                kv_memory_mb=kv_memory_mb,
                threads=threads,
                more=() if draft_model is None else ("--draft-model", draft_model),
            )
        )
        threading.Thread(target=_announce, args=(listen, supervisor), daemon=True).start()
        failure = supervisor.run()
    if failure is not None:
        is_configuration = failure.returncode == EXIT_CONFIGURATION
        raise Failure(str(failure), EXIT_CONFIGURATION if is_configuration else EXIT_FAILURE)


def asked(section: str, name: str) -> str:
    """Return what a variable, else the configuration file says; empty where neither does.

    Only for what this command must know itself: the services read and check the rest.
    """
    variable = os.environ.get(f"ISOBATCH_{section.upper()}_{name.upper()}")
    if variable is not None:
        return variable
    try:
        document, _ = settings.read_file(os.environ)
    except settings.SettingsError as error:
        raise Failure(str(error), EXIT_CONFIGURATION) from None
    value = document.get(section, {}).get(name, "")
    return value if isinstance(value, str) else ""


def _print_line(name: str, line: str) -> None:
    # One write, so that lines of two children never mix.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{name:<{_NAME_WIDTH}} | {line}\n")
        sys.stderr.flush()


def _announce(address: str, supervisor: Supervisor) -> None:
    def keep_waiting() -> bool:
        return not supervisor.stopping and supervisor.failure is None

    if wait_until_serving(address, keep_waiting):
        output.note(f"isobatch serves on {address}")


def _say_what_is_left(address: str) -> None:
    """Say what the end waits for, if for anything: a scheduler that drains still answers."""
    from scheduler_service.client import Client, IsobatchError

    try:
        with Client(address, connect_timeout=_STATS_SECONDS, retry_seconds=0.0) as client:
            stats = client.stats(timeout=_STATS_SECONDS)
    except IsobatchError:
        return  # it has ended
    count = stats.num_running + stats.num_waiting
    if count:
        what = "1 request is" if count == 1 else f"{count} requests are"
        output.note(f"{what} being finished; a second Ctrl-C ends at once")


def _check_free(address: str) -> None:
    """Raise Failure when somebody listens on a Unix socket already."""
    if not address.startswith(runtime_paths.UNIX_PREFIX):
        return
    path = address.removeprefix(runtime_paths.UNIX_PREFIX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise Failure(
        f"[serve] a socket must be free, got a server that answers on {path}", EXIT_CONFIGURATION
    )
