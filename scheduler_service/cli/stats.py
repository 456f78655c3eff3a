"""`isobatch stats`: counts of the server's live state."""

from __future__ import annotations

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected
from scheduler_service.cli.options import address_option, json_option


@click.command("stats")
@address_option
@json_option
def command(address: str | None, as_json: bool) -> None:
    """Show how busy the server is."""
    with connected(address) as client:
        stats = client.stats()
        server = client.address
    if as_json:
        output.write_json(stats)
        return
    output.write_table(
        server,
        {
            "requests running": f"{stats.num_running:,}",
            "requests waiting": f"{stats.num_waiting:,} (interactive "
            f"{stats.num_waiting_interactive:,}, normal {stats.num_waiting_normal:,}, "
            f"batch {stats.num_waiting_batch:,})",
            "tokens waiting": f"{stats.num_waiting_tokens:,}",
            "requests paused": f"{stats.num_paused:,}",
            "steps": f"{stats.num_steps:,}",
            "tokens generated": f"{stats.num_generated_tokens:,}",
            "drafted tokens accepted": f"{stats.num_accepted_draft_tokens:,} "
            f"of {stats.num_draft_tokens:,}",
            "prompt tokens": f"{stats.num_prompt_tokens:,}",
            "preemptions": f"{stats.num_preemptions:,}",
            "cache blocks free": f"{stats.free_blocks:,} of {stats.total_blocks:,}",
            "executor": "connected" if stats.executor_connected else "not connected",
            "executor reconnects": f"{stats.num_executor_reconnects:,}",
        },
    )
