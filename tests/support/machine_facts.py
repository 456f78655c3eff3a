"""What a written result depends on: the machine, the commit, the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, str | int | None]:
    """Return the facts by name."""
    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False, cwd=_ROOT,
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
    """Return the command line of this process, its script relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(_ROOT) if script.is_relative_to(_ROOT) else Path(script.name)
    return shlex.join(["python", str(name), *sys.argv[1:]])


def markdown() -> str:
    """Return three lines of a Markdown list."""
    facts = machine()
    return (
        f"- Command: `{command()}`\n"
        f"- Machine: {facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}, Python {facts['python']}\n"
        f"- Commit {facts['commit']}, {facts['date']}\n"
    )
