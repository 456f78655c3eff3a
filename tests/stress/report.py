"""The results of a stress run as JSON and Markdown."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.stress.load_harness import Result, Round


def machine() -> dict[str, str | int | None]:
    """What a result depends on."""
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def command() -> str:
    """The command line of this process, relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parents[2]
    name = script.relative_to(root) if script.is_relative_to(root) else Path(script.name)
    return shlex.join(["python", str(name), *sys.argv[1:]])


def write_json(path: Path, result: Result) -> None:
    """Write everything that was counted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": command(), "machine": machine(), "is_clean": result.is_clean}
    path.write_text(json.dumps(document | asdict(result), indent=1) + "\n")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


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
    facts = machine()
    settings = result.settings
    last = result.rounds[-1].idle
    assert last is not None
    lines = [
        f"- Command: `{command()}`",
        f"- Machine: {facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}, Python {facts['python']}",
        f"- Commit {facts['commit']}, {facts['date']}",
        f"- Model: {settings.profile}; cache {settings.kv_memory_mb} MiB; {settings.pool_size} "
        f"distinct requests; seed {settings.seed}",
        f"- Requests: {result.total('requests'):,}, of which {result.total('whole'):,} ran to "
        f"their own end and equal their solo run whole; {result.total('tokens'):,} tokens compared",
        f"- What clients did: {_counts(result.totals('fates'))}",
        f"- How streams ended: {_counts(result.totals('ends'))}",
        f"- What the scheduler counted (killed clients included): "
        f"{_counts({name: int(count) for name, count in last.outcomes.items()})}; "
        f"{last.stats.num_steps:,} steps, {last.stats.num_preemptions:,} preemptions, "
        f"{last.stats.num_executor_reconnects} executor restarts",
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
