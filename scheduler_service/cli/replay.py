"""`isobatch replay`: a traced request once more, alone, with every digest checked."""

from __future__ import annotations

from pathlib import Path

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected_or_private
from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_INVALID, Failure
from scheduler_service.cli.options import (
    address_option,
    json_option,
    own_model_option,
    private_server_options,
)
from scheduler_service.cli.trace_files import (
    check_same_model,
    company,
    own_model,
    read_trace,
    run_again,
    write_trace,
)


@click.command("replay")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the trace of the replay in this file.",
)
@own_model_option
@private_server_options
@address_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    trace_path: Path | None,
    model: str | None,
    serve_privately: bool,
    threads: int | None,
    kv_memory_mb: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Run the request of a trace again and check every token and every digest.

    The server must have the same weights and compute in the same numeric class; with --serve one is
    started for this command, by the configuration that a server would have. Exit codes: 0 equal, 1
    different, 3 no server, 4 another model or class.
    """
    from scheduler_service.tracing.compare import compare, obstacles
    from scheduler_service.tracing.explain import plain, words

    recorded = read_trace(trace)
    with connected_or_private(
        address,
        serve_privately=serve_privately,
        model=own_model(model, recorded, serve_privately=serve_privately),
        threads=threads,
        kv_memory_mb=kv_memory_mb,
    ) as (client, _):
        check_same_model(client, recorded, same_class=True)
        replayed, data = run_again(client, recorded)
    if trace_path is not None:
        write_trace(trace_path, data)
    others = obstacles(recorded, replayed)
    if others:
        raise Failure(
            f"[replay] the server must take the request as it was, got other {', '.join(others)}",
            EXIT_INVALID,
        )
    found = compare(recorded, replayed)
    if as_json:
        output.write_json(plain(recorded, replayed, found))
    else:
        click.echo(f"A: {trace}. B: the replay.")
        for line in words(recorded, replayed, found):
            click.echo(line)
    if company(replayed):
        output.note(company(replayed))
    ctx.exit(0 if found.is_equal else EXIT_FAILURE)
