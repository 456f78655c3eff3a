"""`isobatch service`: both services under launchd (Mac) or systemd (Linux)."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from scheduler_service import settings
from scheduler_service.cli import children, output
from scheduler_service.cli.config import effective
from scheduler_service.cli.failures import EXIT_CONFIGURATION, EXIT_FAILURE, Failure
from scheduler_service.cli.options import EMBEDDED_MODEL, json_option
from scheduler_service.service_manager.spec import (
    NAMES,
    Manager,
    ManagerError,
    Status,
    make_specs,
)

_FIRST_FILE: Final = """\
# isobatch. `isobatch config show --origin` lists every key, its value and where it comes from.
# After a change: isobatch service restart

[scheduler]
# max_num_waiting = 1024

[executor]
# model = "smollm2-135m-instruct"
# kv_memory_mb = 0
"""


def is_mac() -> bool:
    """Whether launchd is the system's supervision."""
    return sys.platform == "darwin"


def home() -> Path:
    """Return the user's folder; raises Failure."""
    path = os.environ.get("HOME", "")
    if not os.path.isabs(path):
        raise Failure(f"[service] HOME must be an absolute path, got {path!r}", EXIT_CONFIGURATION)
    return Path(path)


def _below_home(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if os.path.isabs(value) else home() / default


def log_folder() -> Path:
    """Return the folder of the services' logs."""
    if is_mac():
        return home() / "Library" / "Logs" / "isobatch"
    return _below_home("XDG_STATE_HOME", ".local/state") / "isobatch"


def manager() -> Manager:
    """Return the supervision of this system."""
    if is_mac():
        from scheduler_service.service_manager.launchd import Launchd

        return Launchd(home())
    from scheduler_service.service_manager.systemd import Systemd

    return Systemd(_below_home("XDG_CONFIG_HOME", ".config"))


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except settings.SettingsError as error:
        raise Failure(str(error), EXIT_CONFIGURATION) from None
    except ManagerError as error:
        raise Failure(str(error), EXIT_FAILURE) from None
    except FileNotFoundError as error:
        if not error.filename or "ctl" not in str(error.filename):
            raise
        raise Failure(
            f"[service] the system must have {error.filename}, got none", EXIT_FAILURE
        ) from None


def _config_file(named: Path | None) -> Path:
    path = named or settings.default_file(os.environ)
    if path is None:
        raise Failure("[service] --config must be given where HOME is not set", EXIT_CONFIGURATION)
    return path


@click.group("service")
def command() -> None:
    """Run scheduler and executor under launchd (Mac) or systemd (Linux)."""


@command.command("install")
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.option("--print", "is_printed", is_flag=True, help="Print the files, and change nothing.")
def install(config: Path | None, is_printed: bool) -> None:
    """Install both services, and start them now and at every login.

    Run it again after an upgrade or when the configuration file moves.
    """
    with _failures():
        if is_printed:
            specs = make_specs(_config_file(config), log_folder(), os.environ)
            for path, content in manager().files(specs).items():
                click.echo(f"# {path}\n{content.decode()}")
            return
        file = _config_file(config)
        manager().probe()
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(_FIRST_FILE)
            output.note(f"wrote {file}")
        specs = make_specs(file, log_folder(), os.environ)
        _prepare(file)
        manager().install(specs)
    output.note(f"installed {' and '.join(spec.name for spec in specs)}; logs in {log_folder()}")


def _prepare(file: Path) -> None:
    """Refuse a configuration that a service would refuse, and fetch the model that we can."""
    arguments = ("--config", str(file))
    effective("scheduler", *arguments)
    rows = effective("executor", *arguments)
    if any((row["name"], row["value"]) == ("model", EMBEDDED_MODEL) for row in rows):
        children.pull(EMBEDDED_MODEL)


def _verb(name: str, text: str, act: Callable[[Manager, tuple[str, ...]], str | None]) -> None:
    @command.command(name, help=text)
    @click.argument("service", type=click.Choice(NAMES), required=False)
    def verb(service: str | None) -> None:
        with _failures():
            left = act(manager(), (service,) if service else NAMES)
        if left:
            output.note(left)


_verb("uninstall", "Stop the services and remove them; the configuration file and logs stay.",
      lambda system, names: system.uninstall(names))  # fmt: skip
_verb("start", "Start the services.", lambda system, names: system.start(names))
_verb("stop", "Stop the services until they are started, or until the next login.",
      lambda system, names: system.stop(names))  # fmt: skip
_verb("restart", "Stop the services and start them.", lambda system, names: system.restart(names))


def describe(status: Status) -> str:
    """Return a service's state in words."""
    if not status.is_installed:
        return "not installed"
    if status.is_running:
        return f"running (pid {status.pid})"
    ended = "" if status.exit_code is None else f"; last exit code {status.exit_code}"
    return f"stopped{f': {status.refused}' if status.refused else ended}"


@command.command("status")
@json_option
def status(as_json: bool) -> None:
    """Show both services; exit code 3 unless both run."""
    with _failures():
        found = manager().status(NAMES)
    if as_json:
        output.write_json([dataclasses.asdict(each) for each in found])
    else:
        output.write_table("services", {each.name: describe(each) for each in found})
    if not all(each.is_running for each in found):
        click.get_current_context().exit(3)


@command.command("logs")
@click.argument("service", type=click.Choice(NAMES), required=False)
@click.option("-n", "--lines", type=click.IntRange(0), default=50, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
def logs(service: str | None, lines: int, follow: bool) -> None:
    """Show the last lines of the services' log files."""
    names = (service,) if service else NAMES
    files: list[Any] = [
        path
        for name in names
        for path in (log_folder() / f"{name}.log", log_folder() / f"{name}.output.log")
        if path.exists() and (follow or path.stat().st_size > 0)
    ]
    if not files:
        raise Failure(f"[service] there must be logs in {log_folder()}, got none", EXIT_FAILURE)
    # tail does this better than we would, and is on every system that has either supervision.
    argv = ["tail", f"-n{lines}", *(["-F"] if follow else []), *map(str, files)]
    os.execvp("tail", argv)
