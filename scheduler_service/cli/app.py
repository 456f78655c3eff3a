"""The group of commands; each command's module is loaded only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

import click

from scheduler_service.cli.failures import EXIT_CONFIGURATION, Failure, interrupted
from scheduler_service.runtime_paths import RuntimePathError

_COMMANDS: Final = (
    "chat",
    "config",
    "doctor",
    "explain",
    "generate",
    "lab",
    "models",
    "pull",
    "replay",
    "serve",
    "service",
    "stats",
    "tokenize",
    "top",
    "trace",
)


class LazyGroup(click.Group):
    """A group whose commands live in modules of this package, named like them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"scheduler_service.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what any command may raise into a documented exit code."""
        try:
            return super().invoke(ctx)
        except RuntimePathError as error:
            raise Failure(str(error), EXIT_CONFIGURATION) from None
        except KeyboardInterrupt:
            raise interrupted() from None


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    try:
        version = importlib.metadata.version("isobatch")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown: runs from a source tree that is not installed"
    click.echo(f"isobatch {version}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failure of a server, 2 usage, 3 unavailable, 4 invalid request, "
    "5 interrupted, 78 configuration.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Serve language models on this machine, and ask them."""
