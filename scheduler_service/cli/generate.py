"""`isobatch generate`: one prompt, one answer, streamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected_or_private
from scheduler_service.cli.inputs import given_or_stdin
from scheduler_service.cli.options import (
    address_option,
    generation_options,
    generation_params,
    json_option,
    private_server_options,
    trace_options,
)
from scheduler_service.cli.output_files import check_writable
from scheduler_service.cli.trace_files import write_trace

if TYPE_CHECKING:
    from scheduler_service.client import Client, Completion, GenerationParams, Prompt


@click.command("generate")
@click.option("-p", "--prompt", help="The prompt; default: what standard input holds.")
@generation_options
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without a chat template.")
@click.option("--stats", "show_stats", is_flag=True, help="Print a line about the answer.")
@click.option(
    "--timeout",
    "--deadline",
    "timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds for the whole answer; refused at once where that is out of reach.",
)
@click.option(
    "--n",
    "num_samples",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Answers to give, one after another; answer i is that of the seed plus i.",
)
@trace_options
@private_server_options
@address_option
@json_option
def command(
    prompt: str | None,
    model: str,
    system: str,
    raw: bool,
    show_stats: bool,
    timeout: float | None,
    num_samples: int,
    trace_path: Path | None,
    trace_kv: bool,
    serve_privately: bool,
    threads: int | None,
    kv_memory_mb: int | None,
    address: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer one prompt.

    The answer streams to standard output. On a terminal, or with --stats, a line about it follows
    on standard error, and one more when --max-tokens or the end of the context cut the answer. With
    --json one object is printed when the answer is complete. Of several answers (--n) each is
    printed when all are complete, under its number; with --json each is a line.
    """
    if raw and system:
        raise click.UsageError("--system needs the chat template: leave --raw out")
    if trace_kv and trace_path is None:
        raise click.UsageError("--trace-kv needs --trace FILE")
    if num_samples > 1 and trace_path is not None:
        raise click.UsageError("--trace needs --n 1")
    check_writable("trace", trace_path)
    text = given_or_stdin(prompt, "--prompt")
    with connected_or_private(
        address,
        serve_privately=serve_privately,
        model=model,
        threads=threads,
        kv_memory_mb=kv_memory_mb,
    ) as (client, served_model):
        completions = _ask(
            client,
            _prompt(text, system, raw=raw),
            replace(
                generation_params(**sampling),
                n=num_samples,
                trace=trace_path is not None,
                trace_kv=trace_kv,
            ),
            model=served_model,
            timeout=timeout,
            stream_text=not as_json and num_samples == 1,
        )
        for completion in completions:
            if as_json:
                # The trace has its own file, and is no text.
                output.write_json(replace(completion, trace=b""))
            else:
                if num_samples > 1:
                    _print_sample(completion)
                if cut := output.cut_line(completion, sampling["max_tokens"], client):
                    output.note(cut)
            if show_stats or (not as_json and sys.stderr.isatty()):
                output.note(output.stats_line(completion))
        if trace_path is not None:
            # Last, so that the answer is there whatever becomes of its trace.
            write_trace(trace_path, completions[0].trace)


def _print_sample(completion: Completion) -> None:
    click.echo(f"--- {completion.sample_index} ---")
    output.write_text(completion.text)
    if not completion.text.endswith("\n"):
        click.echo()


def _prompt(text: str, system: str, *, raw: bool) -> Prompt:
    from scheduler_service.client import ChatMessage

    if raw:
        return text
    turns = [ChatMessage("system", system)] if system else []
    return (*turns, ChatMessage("user", text))


def _ask(
    client: Client,
    prompt: Prompt,
    params: GenerationParams,
    *,
    model: str,
    timeout: float | None,
    stream_text: bool,
) -> tuple[Completion, ...]:
    with client.generate(prompt, params, model=model, timeout=timeout) as stream:
        try:
            for event in stream:
                if stream_text:
                    output.write_text(event.text)
        finally:
            # Whatever follows, an error above all, begins on a line of its own.
            if stream_text and stream.text and not stream.text.endswith("\n"):
                click.echo()
        return stream.completions()
