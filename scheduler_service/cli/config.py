"""`isobatch config`: what is set, and where it is set."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import click

from scheduler_service import settings
from scheduler_service.cli import children, output
from scheduler_service.cli.failures import EXIT_CONFIGURATION, EXIT_FAILURE, Failure
from scheduler_service.cli.options import json_option


@click.group("config")
def command() -> None:
    """Show the configuration of both services."""


def effective(section: str, *arguments: str) -> list[dict[str, Any]]:
    """Return name, value and origin of every setting of a service.

    The service itself says so, in a process of its own: the command line knows no executor. Raises
    Failure with its words when it refuses its configuration.
    """
    done = subprocess.run(
        children.python_module(f"{section}_service", settings.SHOW_FLAG, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        is_known = done.returncode == EXIT_CONFIGURATION
        # Its own name, before which the one of this program comes.
        words = done.stderr.strip().removeprefix(f"isobatch-{section}: ")
        raise Failure(words, EXIT_CONFIGURATION if is_known else EXIT_FAILURE)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def metrics_port(section: str, *arguments: str) -> int:
    """Return the port of a service's metrics page; raises Failure as `effective` does."""
    rows = effective(section, *arguments)
    return next(int(row["value"]) for row in rows if row["name"] == "metrics_port")


@command.command("show")
@click.option("--config", metavar="FILE", help="Configuration file (TOML) instead of the usual.")
@click.option("--origin", "with_origin", is_flag=True, help="Also show where each value is from.")
@json_option
def show(config: str | None, with_origin: bool, as_json: bool) -> None:
    """Show every setting of both services.

    A service takes a value from its flags, else from a variable, else from the configuration file,
    else the default.
    """
    arguments = ["--config", config] if config else []
    found = {section: effective(section, *arguments) for section in settings.SECTIONS}
    if as_json:
        output.write_json(found)
        return
    for section, rows in found.items():
        output.write_table(
            f"[{section}]",
            {
                each["name"]: _text(each["value"])
                + (f"    # {each['origin']}" if with_origin else "")
                for each in rows
            },
        )


@command.command("path")
def path() -> None:
    """Print the path of the configuration file, whether or not it exists."""
    file = os.environ.get(settings.FILE_VARIABLE) or settings.default_file(os.environ)
    if not file:
        raise Failure("[config] HOME must be set, or a file named", EXIT_CONFIGURATION)
    click.echo(str(file))


def _text(value: object) -> str:
    """Return a value as TOML writes it."""
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value, ensure_ascii=False)
