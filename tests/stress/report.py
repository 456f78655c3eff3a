"""The results of a stress run as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.stress.load_harness import Result, Round
from tests.support import machine_facts


def write_json(path: Path, result: Result) -> None:
    """Write everything that was counted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": machine_facts.command(),
        "machine": machine_facts.machine(),
        "is_clean": result.is_clean,
    }
    path.write_text(json.dumps(document | asdict(result), indent=1) + "\n")


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())


def _row(index: int, played: Round) -> str:
    idle = played.idle
    assert idle is not None
    cells = [
        str(index), str(played.num_streams), f"{played.seconds:.0f}", f"{played.requests:,}",
        f"{played.whole:,}", f"{played.tokens:,}", str(played.executor_kills),
    ]  # fmt: skip
    for process in (idle.scheduler, idle.executor):
        cells.append(
            f"{process.num_threads} / {process.num_descriptors} / {process.resident_mebibytes:.1f}"
        )
    return "| " + " | ".join(cells) + " |"


def markdown(result: Result) -> str:
    """Return a section of Markdown."""
    settings = result.settings
    last = result.rounds[-1].idle
    assert last is not None
    lines = [
        machine_facts.markdown().rstrip(),
        f"- Model: {settings.profile}; cache {settings.kv_memory_mb} MiB; {settings.pool_size} "
        f"distinct requests; seed {settings.seed}; kernel units {', '.join(settings.units)}",
        f"- Requests: {result.total('requests'):,}, of which {result.total('whole'):,} ran to "
        f"their own end and equal their solo run whole; {result.total('tokens'):,} tokens compared",
        f"- What clients did: {_counts(result.totals('fates'))}",
        f"- How streams ended: {_counts(result.totals('ends'))}",
        "- What the scheduler counted, killed clients included: requests "
        f"{_counts(last.outcomes)}; preemptions {_counts(last.preemptions)}; "
        f"{last.stats.num_steps:,} steps, {last.stats.num_executor_reconnects} reconnects",
        f"- Traced requests run again alone afterwards, every digest compared: {result.replays}",
        f"- **Changed texts and other violations: {len(result.violations)}. "
        f"Leaks: {len(result.leaks)}.**",
        "",
        "| round | streams | s | requests | whole | tokens | executor kills "
        "| scheduler, idle: threads / descriptors / MiB | executor |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(index, played) for index, played in enumerate(result.rounds)),
    ]
    lines += [f"- {each}" for each in result.violations + result.leaks]
    return "\n".join(lines) + "\n"
