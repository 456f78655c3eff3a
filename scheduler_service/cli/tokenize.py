"""`isobatch tokenize`: the token ids of a text."""

from __future__ import annotations

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected
from scheduler_service.cli.inputs import given_or_stdin
from scheduler_service.cli.options import address_option, json_option


@click.command("tokenize")
@click.argument("text", required=False)
@click.option("-m", "--model", default="", help="Model; default: the server's.")
@click.option("--chat", "as_chat", is_flag=True, help="As a user's turn, by the chat template.")
@address_option
@json_option
def command(
    text: str | None, model: str, as_chat: bool, address: str | None, as_json: bool
) -> None:
    """Print the token ids of TEXT, or of standard input, as `generate` would use them."""
    text = given_or_stdin(text, "TEXT")
    with connected(address) as client:
        from scheduler_service.client import ChatMessage

        prompt = (ChatMessage("user", text),) if as_chat else text
        result = client.tokenize(prompt, model=model)
    if as_json:
        output.write_json(result)
    else:
        click.echo(" ".join(str(token_id) for token_id in result.token_ids))
