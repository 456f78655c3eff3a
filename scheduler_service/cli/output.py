"""What commands print: answers, statistics, JSON, and progress on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from scheduler_service.client import Client, Completion

# Longest wait for what is only a remark.
_ASK_SECONDS: Final = 2.0
# Control characters other than tab and line feed. A model's text may hold terminal commands.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_text(text: str) -> None:
    """Print part of an answer at once; on a terminal, without control characters."""
    if text:
        click.echo(_CONTROL.sub("", text) if sys.stdout.isatty() else text, nl=False)


def write_json(value: object) -> None:
    """Print a value of the SDK, or plain data, as one line of JSON."""
    click.echo(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return a value as plain data for JSON; bytes become hexadecimal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


def stats_line(completion: Completion) -> str:
    """Return one line about an answer: tokens, times, speed, and what repeats it."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.num_prompt_tokens} prompt tokens"]
    if usage.num_cached_tokens:
        parts[0] += f" ({usage.num_cached_tokens} cached)"
    parts.append(f"{usage.num_generated_tokens} generated")
    parts.append(f"first token {timings.time_to_first_token_seconds:.3f} s")
    streaming = timings.total_seconds - timings.time_to_first_token_seconds
    if usage.num_generated_tokens > 1 and streaming > 0:
        parts.append(f"{(usage.num_generated_tokens - 1) / streaming:.1f} tokens/s")
    if usage.num_draft_tokens:
        parts.append(
            f"{usage.num_accepted_draft_tokens} of {usage.num_draft_tokens} drafted tokens accepted"
        )
    if completion.num_preemptions:
        parts.append(f"preempted {completion.num_preemptions}x")
    parts.append(f"ended by {completion.finish_reason}")
    parts.append(f"seed {completion.seed}")
    parts.append(f"{completion.model} [{completion.numeric_class}]")
    return " | ".join(parts)


def cut_line(completion: Completion, max_tokens: int | None, client: Client) -> str:
    """Return a line that says what cut an answer off; empty where it ended by itself.

    Asks the server for the model's context where the limit of tokens was not what did it.
    """
    from scheduler_service.client import FinishReason, IsobatchError

    usage = completion.usage
    if completion.finish_reason is not FinishReason.LENGTH:
        return ""
    if max_tokens is not None and usage.num_generated_tokens >= max_tokens:
        return (
            f"The answer was cut at {usage.num_generated_tokens} tokens; --max-tokens allows more."
        )
    total = usage.num_prompt_tokens + usage.num_generated_tokens
    contexts: list[int] = []
    with contextlib.suppress(IsobatchError):
        contexts = [each.context_length for each in client.list_models(timeout=_ASK_SECONDS)[:1]]
    if any(total < each for each in contexts):
        return (
            f"The answer was cut: with {total} tokens the executor's key/value cache is full; "
            f"a larger kv_memory_mb allows more, up to the model's context of {contexts[0]}."
        )
    return f"The answer was cut: with {total} tokens the model's context is full."


def note(message: str) -> None:
    """Tell the person at the terminal something; standard output is for answers."""
    click.echo(message, err=True)


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Show that something goes on, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def write_table(title: str, rows: dict[str, str]) -> None:
    """Print names and values in two columns under a title; only a terminal's lines are folded."""
    if not sys.stdout.isatty():
        # A file or another program: a path that is cut in two could not be found or copied.
        width = max(map(len, rows), default=0)
        click.echo(title)
        for name, value in rows.items():
            click.echo(f"  {name:<{width}}  {_CONTROL.sub('', value)}".rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        # Text, not markup: a device or a model may have brackets in its name.
        table.add_row(Text(f"  {name}"), Text(_CONTROL.sub("", value), overflow="fold"))
    console = Console(highlight=False)
    console.print(Text(title, style="bold"))
    console.print(table)
