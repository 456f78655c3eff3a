"""`isobatch trace`: what traces hold, for other tools."""

from __future__ import annotations

import json
from pathlib import Path

import click

from scheduler_service.cli.trace_files import read_trace


@click.group("trace")
def command() -> None:
    """Read traces of requests."""


@command.command("export")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "perfetto"]),
    default="jsonl",
    show_default=True,
    help="jsonl: one record a line. perfetto: the steps, for ui.perfetto.dev or chrome://tracing.",
)
def export(trace: Path, kind: str) -> None:
    """Write a trace to standard output in another format."""
    from scheduler_service.tracing.export import json_lines, perfetto

    found = read_trace(trace)
    if kind == "perfetto":
        click.echo(json.dumps(perfetto(found)))
        return
    for line in json_lines(found):
        click.echo(line)
