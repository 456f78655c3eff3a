"""`isobatch explain`: where two runs of one request part, and why."""

from __future__ import annotations

from pathlib import Path

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected_or_private
from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_USAGE, Failure
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
)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("explain")
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE, required=False)
@click.option("--solo", is_flag=True, help="Compare with a run alone, on the server, now.")
@own_model_option
@private_server_options
@address_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    a: Path,
    b: Path | None,
    solo: bool,
    model: str | None,
    serve_privately: bool,
    threads: int | None,
    kv_memory_mb: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Say where the traces A and B of one request part, and what made them.

    Finds the first token that differs, the first logits that differ before it, the first keys and
    values that differ before those, and who wrote these: step, kernel paths, neighbours. Traces
    come from `isobatch generate --trace FILE`, the SDK, or the scheduler's trace_dir.

    Exit codes, as those of diff: 0 equal, 1 different, 2 when they are not of one request.
    """
    from scheduler_service.tracing.compare import compare, obstacles
    from scheduler_service.tracing.explain import plain, words

    if solo is (b is not None):
        raise click.UsageError("give a second trace, or --solo for a run of the first alone")
    if serve_privately and not solo:
        raise click.UsageError("--serve is for --solo")
    first = read_trace(a)
    if b is None:
        with connected_or_private(
            address,
            serve_privately=serve_privately,
            model=own_model(model, first, serve_privately=serve_privately),
            threads=threads,
            kv_memory_mb=kv_memory_mb,
        ) as (client, _):
            check_same_model(client, first, same_class=False)
            second, _ = run_again(client, first)
    else:
        second = read_trace(b)
    others = obstacles(first, second)
    if others:
        raise Failure(
            f"[explain] both traces must be of one request, got other {', '.join(others)}",
            EXIT_USAGE,
        )
    found = compare(first, second)
    if as_json:
        output.write_json(plain(first, second, found))
    else:
        named = [(str(a), first), (str(b) if b is not None else "the run alone", second)]
        for side, (name, trace) in zip("AB", named, strict=True):
            count = len(trace.tokens)
            click.echo(f"{side}: {name}, {count} tokens, class {trace.header.numeric_class}")
        for line in words(first, second, found):
            click.echo(line)
    if b is None and company(second):
        output.note(company(second))
    ctx.exit(0 if found.is_equal else EXIT_FAILURE)
