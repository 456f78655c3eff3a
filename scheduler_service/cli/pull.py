"""`isobatch pull`: brings a model to this machine."""

from __future__ import annotations

import click

from scheduler_service.cli import children, output
from scheduler_service.cli.options import EMBEDDED_MODEL, json_option


@click.command("pull")
@click.argument("name", default=EMBEDDED_MODEL)
@json_option
def command(name: str, as_json: bool) -> None:
    """Bring the model NAME to this machine, and print its path."""
    path = children.pull(name)
    if as_json:
        output.write_json({"model": name, "path": str(path)})
    else:
        click.echo(str(path))
