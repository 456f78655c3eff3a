"""`isobatch models`: what can be asked for."""

from __future__ import annotations

from typing import Final

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected
from scheduler_service.cli.options import address_option, json_option

# Characters of a digest that are enough to tell models apart; --json has all of them.
_DIGEST_SHOWN: Final = 16


@click.command("models")
@address_option
@json_option
def command(address: str | None, as_json: bool) -> None:
    """List the models of the server, the default first."""
    with connected(address) as client:
        models = client.list_models()
    if as_json:
        output.write_json(models)
        return
    if not models:
        output.note("The server has no model yet: its executor is not connected.")
    for model in models:
        output.write_table(
            model.model,
            {
                "architecture": model.architecture,
                "parameters": f"{model.num_parameters / 1e6:,.1f} million",
                "context": f"{model.context_length:,} tokens",
                "vocabulary": f"{model.vocab_size:,} tokens",
                "chat template": "yes" if model.has_chat_template else "no",
                "numeric class": model.numeric_class,
                "weights": model.weights_digest[:_DIGEST_SHOWN],
                "device": model.device,
            },
        )
