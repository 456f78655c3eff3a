"""`isobatch explain`: where two runs of one request part, and why."""

from __future__ import annotations

from pathlib import Path

import click

from scheduler_service.cli.failures import EXIT_USAGE, Failure
from scheduler_service.cli.options import json_option
from scheduler_service.cli.run_again import Server, note_company, server_options, tell
from scheduler_service.cli.trace_files import read_trace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("explain")
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE, required=False)
@click.option("--solo", is_flag=True, help="Compare with a run alone, on the server, now.")
@server_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    a: Path,
    b: Path | None,
    solo: bool,
    server: Server,
    as_json: bool,
) -> None:
    """Say where the traces A and B of one request part, and what made them.

    Finds the first token that differs, the first logits that differ before it, the first keys and
    values that differ before those, and who wrote these: step, kernel paths, neighbours. Traces
    come from `isobatch generate --trace FILE`, the SDK, or the scheduler's trace_dir.

    Exit codes, as those of diff: 0 equal, 1 different, 2 when they are not of one request.
    """
    from scheduler_service.tracing.compare import compare, obstacles

    if solo is (b is not None):
        raise click.UsageError("give a second trace, or --solo for a run of the first alone")
    if server.serve_privately and not solo:
        raise click.UsageError("--serve is for --solo")
    first = read_trace(a)
    second = server.run(first, same_class=False)[0] if b is None else read_trace(b)
    others = obstacles(first, second)
    if others:
        raise Failure(
            f"[explain] both traces must be of one request, got other {', '.join(others)}",
            EXIT_USAGE,
        )
    found = compare(first, second)
    named = [(str(a), first), ("the run alone" if b is None else str(b), second)]
    heads = [
        f"{side}: {name}, {len(trace.tokens)} tokens, class {trace.header.numeric_class}"
        for side, (name, trace) in zip("AB", named, strict=True)
    ]
    exit_code = tell(first, second, found, *heads, as_json=as_json)
    if b is None:
        note_company(second)
    ctx.exit(exit_code)
