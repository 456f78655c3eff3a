"""`isobatch replay`: a traced request once more, alone, with every digest checked."""

from __future__ import annotations

from pathlib import Path

import click

from scheduler_service.cli.failures import EXIT_INVALID, Failure
from scheduler_service.cli.options import json_option
from scheduler_service.cli.output_files import check_writable
from scheduler_service.cli.run_again import Server, note_company, server_options, tell
from scheduler_service.cli.trace_files import read_trace, write_trace


@click.command("replay")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the trace of the replay in this file.",
)
@server_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    trace_path: Path | None,
    server: Server,
    as_json: bool,
) -> None:
    """Run the request of a trace again and check every token and every digest.

    The server must have the same weights and compute in the same numeric class; with --serve one is
    started for this command, by the configuration that a server would have. Exit codes: 0 equal, 1
    different, 3 no server, 4 another model or class.
    """
    from scheduler_service.tracing.compare import compare, obstacles

    check_writable("trace", trace_path)
    recorded = read_trace(trace)
    replayed, data = server.run(recorded, same_class=True)
    if trace_path is not None:
        write_trace(trace_path, data)
    others = obstacles(recorded, replayed)
    if others:
        raise Failure(
            f"[replay] the server must take the request as it was, got other {', '.join(others)}",
            EXIT_INVALID,
        )
    found = compare(recorded, replayed)
    exit_code = tell(recorded, replayed, found, f"A: {trace}. B: the replay.", as_json=as_json)
    note_company(replayed)
    ctx.exit(exit_code)
