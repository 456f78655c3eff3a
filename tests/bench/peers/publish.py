"""Puts a report of the peer benchmark into the documentation: figures, table and picture."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.picture import draw
from tests.bench.peers.table import OURS, Row, markdown

SERVING: Final = "Serving: all generated tokens over wall time, prompts included"
DECODE: Final = "Decode only: after every stream has its first token"


def slug(processor: str) -> str:
    """A processor's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-") or "unknown"


def curves(rows: Sequence[Row]) -> dict[str, dict[int, Sequence[float]]]:
    """What the picture shows: every side's rates of serving, and the peer's of decode alone."""
    found: dict[str, dict[int, Sequence[float]]] = {}
    for row in rows:
        if row.group not in (SERVING, DECODE):
            continue
        streams = int(row.label.split()[0])
        suffix = "" if row.group == SERVING else ", decode only"
        found.setdefault(OURS + suffix, {})[streams] = row.ours
        found.setdefault(row.peer + suffix, {})[streams] = row.theirs
    return found


def _section(report: Mapping[str, Any], figures: str, picture: str) -> str:
    """One machine: what was measured on it, and its tables."""
    machine, settings = report["machine"], report["settings"]
    versions = "\n".join(f"- {name}: {text}" for name, text in report["versions"].items())
    notes = "\n".join(f"- {note}" for note in report["notes"])
    rows = [Row.from_json(row) for row in report["rows"]]
    return f"""## {machine["processor"]}

![Throughput over concurrency on {machine["processor"]}]({picture})

{machine["cores"]} cores, {machine["system"]}; {report["date"]}; {settings["rounds"]} rounds,
{settings["threads"]} compute threads each, {settings["tokens"]} tokens a stream. All figures:
[{figures}]({figures}).

{versions}

{notes}

{markdown(rows)}"""


def page(sections: Sequence[str]) -> str:
    """The Markdown page."""
    return f"""# Beside llama.cpp on the same machine

Written by `make bench-peers BENCH_ARGS=--publish`; do not edit. Machines are in the order of
measurement, the last one first.

Both sides ran in turn (ours, theirs, ours, theirs, ...) with the same file and the same token ids
as prompts (new in every round, so that no cache helps), greedy. Ours was loaded through scheduler,
executor and SDK, llama-server through streamed HTTP; each load generator was a process of its own.
A ratio above 1 means that isobatch is ahead; the rounds are in the order in which they were
measured. isobatch computes with 12-bit activations and gives every request the same bits at any
concurrency; llama.cpp computes with 8-bit activations.

{chr(10).join(sections)}"""


def publish(report: Mapping[str, Any], docs: Path) -> list[Path]:
    """Writes docs/measurements/peers-CPU.json, and docs/peers.md with images of all machines."""
    measurements = docs / "measurements"
    measurements.mkdir(parents=True, exist_ok=True)
    own = measurements / f"peers-{slug(report['machine']['processor'])}.json"
    own.write_text(json.dumps(report, indent=1) + "\n")
    written, sections = [own], []
    found = {path: json.loads(path.read_text()) for path in measurements.glob("peers-*.json")}
    for path, one in sorted(found.items(), key=lambda item: item[1]["date"], reverse=True):
        picture = docs / "images" / f"{path.stem}.svg"
        title = f"{one['model']} on {one['machine']['processor']}"
        draw(curves([Row.from_json(row) for row in one["rows"]]), title, picture)
        relative = [str(file.relative_to(docs)) for file in (path, picture)]
        sections.append(_section(one, *relative))
        written.append(picture)
    text = docs / "peers.md"
    text.write_text(page(sections))
    return [*written, text]
