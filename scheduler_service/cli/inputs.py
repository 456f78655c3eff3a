"""Where commands take their text from: an option or argument, else standard input."""

from __future__ import annotations

import sys

import click


def given_or_stdin(text: str | None, what: str) -> str:
    """Return `text`, or what standard input holds; `what` names the option in the error."""
    if text is not None:
        return text
    if sys.stdin.isatty():
        raise click.UsageError(f"give {what}, or text on standard input")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input must be UTF-8, got {error}") from None
    if not text:
        raise click.UsageError(f"give {what}, or text on standard input, got none there")
    return text
