"""`isobatch top`: a live view of both services, from their metrics pages."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from scheduler_service.cli import config, output, scrape
from scheduler_service.cli.connection import START_HINT
from scheduler_service.cli.failures import EXIT_CONFIGURATION, EXIT_UNAVAILABLE, Failure
from scheduler_service.cli.options import json_option

_PORT = click.IntRange(1, 65535)


@click.command("top")
@click.option("--metrics-port", type=_PORT, help="Scheduler's, instead of the configured one.")
@click.option("--executor-metrics-port", type=_PORT, help="Likewise the executor's.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="Seconds."
)
@click.option("--once", is_flag=True, help="Show one interval and exit.")
@json_option
def command(
    metrics_port: int | None,
    executor_metrics_port: int | None,
    interval: float,
    once: bool,
    as_json: bool,
) -> None:
    """Show throughput, latency, kernels and cache as they change, until Ctrl-C.

    Where no terminal is, one interval is written below the other. With --json, one interval as one
    line of JSON.
    """
    ports = (
        _configured("scheduler") if metrics_port is None else metrics_port,
        _configured("executor") if executor_metrics_port is None else executor_metrics_port,
    )
    summaries = watch(ports, interval)
    if as_json:
        output.write_json(next(summaries))
        return
    # Ctrl-C is how one leaves.
    with contextlib.suppress(KeyboardInterrupt):
        if once or not sys.stdout.isatty():
            for each in itertools.islice(summaries, 1 if once else None):
                for title, rows in tables(each):
                    output.write_table(title, rows)
            return
        from rich.live import Live

        with Live(auto_refresh=False, screen=False) as live:
            for each in summaries:
                live.update(_drawing(each), refresh=True)


def _configured(section: str) -> int:
    """Return a service's port; raises Failure where its metrics are off or its settings refused."""
    port = config.metrics_port(section)
    if port == 0:
        raise Failure(
            f"[top] the {section}'s metrics must be on, got metrics_port = 0", EXIT_CONFIGURATION
        )
    return port


def watch(ports: tuple[int, int], interval: float) -> Iterator[dict[str, Any]]:
    """Give a summary of each interval, for ever; raises Failure where neither service answers."""
    before = [scrape.read(port) for port in ports]
    if before == [None, None]:
        raise Failure(
            f"[top] a metrics page must answer on port {ports[0]} or {ports[1]}, got none\n"
            f"{START_HINT}",
            EXIT_UNAVAILABLE,
        )
    while True:
        time.sleep(interval)
        now = [scrape.read(port) for port in ports]
        changes = [
            scrape.Change(old, new) if old is not None and new is not None else None
            for old, new in zip(before, now, strict=True)
        ]
        yield scrape.summary(*changes)
        before = now


def tables(summary: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return titles, and names and values below them."""
    scheduler, executor = summary["scheduler"], summary["executor"]
    return [
        ("scheduler", _scheduler_rows(scheduler) if scheduler else {"state": "does not answer"}),
        ("executor", _executor_rows(executor) if executor else {"state": "does not answer"}),
    ]


def _scheduler_rows(values: dict[str, Any]) -> dict[str, str]:
    return {
        "tokens/s": f"{values['generated_tokens_per_second']:,.1f} generated   "
        f"{sum(values['prompt_tokens_per_second'].values()):,.1f} of prompts",
        "requests": f"{values['running']:,.0f} running   {values['waiting']:,.0f} waiting",
        "ended/s": _list(values["requests_per_second"], "{:.2f}"),
        "first token": _seconds(values["time_to_first_token_seconds"]),
        "between tokens": _seconds(values["inter_token_latency_seconds"]),
        "step time": _list(values["step_phase_share"], "{:.0%}"),
        "executor": "connected" if values["executor_connected"] else "not connected",
        "memory": f"{values['resident_bytes'] / 2**20:,.0f} MiB",
    }


def _executor_rows(values: dict[str, Any]) -> dict[str, str]:
    rows, speed = values["rows_per_step"], values["weight_bytes_per_second"]
    mean = "" if rows is None else f"   {rows:.1f} rows each"
    return {
        "model": f"{values['model']} on {values['unit']}",
        "steps/s": f"{values['steps_per_second']:,.1f}{mean}",
        "linear layers": _list(values["linear_path_share"], "{:.0%}"),
        "weights": "-" if speed is None else f"{speed / 1e9:,.1f} GB/s",
        "cache blocks": _list(values["kv_blocks"], "{:,.0f}", keep_zero=True),
        "bad rows": f"{values['non_finite_rows']:,.0f}",
        "memory": f"{values['resident_bytes'] / 2**20:,.0f} MiB",
    }


def _list(values: dict[str, float], form: str, *, keep_zero: bool = False) -> str:
    shown = [f"{name} {form.format(value)}" for name, value in values.items() if value or keep_zero]
    return "   ".join(shown) or "-"


def _seconds(values: dict[str, float | None]) -> str:
    shown = [f"{name} {value * 1e3:,.0f} ms" for name, value in values.items() if value is not None]
    return "   ".join(shown) or "-"


def _drawing(summary: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    parts = []
    for title, rows in tables(summary):
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(Text(name, style="bold"), Text(value))
        parts.append(Panel(table, title=title, title_align="left"))
    return Group(*parts)
