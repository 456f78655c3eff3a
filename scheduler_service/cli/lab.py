"""`isobatch lab`: experiments that show what kernels do to results on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from scheduler_service.cli import output
from scheduler_service.cli.options import EMBEDDED_MODEL
from scheduler_service.cli.output_files import check_writable, write_file
from scheduler_service.cli.private_executors import private_executors

if TYPE_CHECKING:
    from scheduler_service.executor_client import ExecutorSession
    from scheduler_service.lab.report import Report

_POLL_SECONDS: Final = 0.05
# The executor's; its reference has no float policies of MLX's.
_BACKENDS: Final = ("auto", "cpu", "metal", "cuda")


@click.group("lab")
def command() -> None:
    """Experiments with kernel policies: what they cost, and what they do to results."""


@command.command("article")
@click.option("-m", "--model", default=EMBEDDED_MODEL, show_default=True, help="Name or path.")
@click.option(
    "--backend", type=click.Choice(_BACKENDS), default="auto", show_default=True,
    help="What computes; auto takes a GPU before the CPU.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Compute threads; default: all cores.")
@click.option("--kv-memory-mb", type=click.IntRange(1), default=64, help="KV cache of each.")
@click.option(
    "--threshold-rows", type=click.IntRange(0), default=4, show_default=True,
    help="Most rows that policy threshold computes row by row.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Small sizes: a few minutes.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as one page.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write it as JSON.")
def article(
    model: str,
    backend: str,
    threads: int | None,
    kv_memory_mb: int,
    threshold_rows: int,
    quick: bool,
    html: Path | None,
    json_file: Path | None,
) -> None:
    """Measure speed by concurrency and policy, and whether company changes results.

    Starts one executor for each of the policies gemv, gemm, threshold, mlx and exact, and drives
    their steps itself: decoding of 1 to 8 sequences, greedy texts alone and beside others, and four
    verify rows beside a long prompt in the same step. On a CPU mlx is slow and gets fewer tokens.
    Other load on the machine shows in speeds, never in what differs. A summary goes to standard
    output.
    """
    from scheduler_service.lab import report as reports
    from scheduler_service.lab.article import POLICIES

    for file in (json_file, html):
        check_writable("lab", file)
    flags = {
        policy: (
            "--policy", policy, "--threshold-rows", str(threshold_rows), "--profile", "off",
            "--backend", backend,
        )
        for policy in POLICIES
    }  # fmt: skip
    with private_executors(model, flags, threads=threads, kv_memory_mb=kv_memory_mb) as (
        addresses,
        check,
    ):
        report = asyncio.run(_run(addresses, check, quick=quick, threshold_rows=threshold_rows))
    if json_file is not None:
        write_file("lab", json_file, f"{json.dumps(reports.as_json(report), indent=1)}\n".encode())
    if html is not None:
        write_file("lab", html, reports.as_html(report).encode())
    click.echo(reports.as_text(report))


async def _run(
    addresses: dict[str, str], check: Callable[[], None], *, quick: bool, threshold_rows: int
) -> Report:
    from scheduler_service.lab import article, prompts
    from scheduler_service.lab.acceptance import acceptance
    from scheduler_service.lab.bench_executor import BenchExecutor
    from scheduler_service.lab.report import Report
    from scheduler_service.text.tokenizer import Tokenizer

    plan = article.QUICK if quick else article.Plan()
    async with AsyncExitStack() as stack:
        benches = {}
        for policy, address in addresses.items():
            session = await _connected(address, check)
            stack.push_async_callback(session.close)
            benches[policy] = BenchExecutor(session)
        description = session.description
        tokenizer = Tokenizer(description.tokenizer)
        encoded = [tokenizer.encode_text(each) for each in prompts.TEXTS[: plan.texts]]
        slow = (name for name, each in benches.items() if article.is_slow(each.numeric_class))
        plans = article.Plans(plan, frozenset(slow))
        speeds = await article.speed(benches, plans, output.note)
        switch = await article.switch(benches, plans, speeds, output.note)
        at_once = description.capabilities.device.startswith(("cuda ", "metal "))
        divergences = await article.by_policy(
            benches,
            lambda each: article.divergence(each, encoded, plans, output.note),
            at_once=at_once,
        )
        cases = await article.by_policy(
            benches, lambda each: article.verify_case(each, plans, output.note), at_once=at_once
        )
        acceptances = await article.by_policy(
            benches, lambda each: acceptance(each, encoded, plans, output.note), at_once=at_once
        )
    capabilities = description.capabilities
    return Report(
        model=capabilities.model.model_id,
        weights_digest=capabilities.model.weights_digest,
        device=capabilities.device,
        numeric_classes={name: bench.numeric_class for name, bench in benches.items()},
        threshold_rows=threshold_rows,
        plan=plan,
        speed=speeds,
        switch=switch,
        divergences=tuple(divergences),
        verify_cases=tuple(cases),
        acceptances=tuple(acceptances),
    )


async def _connected(address: str, check: Callable[[], None]) -> ExecutorSession:
    from scheduler_service.executor_client import ExecutorClient, ExecutorUnavailableError

    client = ExecutorClient(address)
    while True:
        check()
        try:
            return await client.connect()
        except ExecutorUnavailableError:
            await asyncio.sleep(_POLL_SECONDS)
