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


def page(report: Mapping[str, Any], rows: Sequence[Row], figures: str, picture: str) -> str:
    """The Markdown page."""
    machine, settings = report["machine"], report["settings"]
    versions = "\n".join(f"- {name}: {text}" for name, text in report["versions"].items())
    notes = "\n".join(f"- {note}" for note in report["notes"])
    return f"""# Beside llama.cpp on the same machine

Written by `make bench-peers BENCH_ARGS=--publish`; do not edit. All figures:
[{figures}]({figures}).

![Throughput over concurrency]({picture})

{machine["processor"]}, {machine["cores"]} cores, {machine["system"]}; {report["date"]}.

{versions}

{notes}

Both sides ran in turn (ours, theirs, ours, theirs, ...), {settings["rounds"]} rounds, with
{settings["threads"]} compute threads each, the same file and the same token ids as prompts (new in
every round, so that no cache helps), greedy, {settings["tokens"]} tokens a stream. Ours was loaded
through scheduler, executor and SDK, llama-server through streamed HTTP; each load generator was a
process of its own. A ratio above 1 means that isobatch is ahead; the rounds are in the order in
which they were measured. isobatch computes with 12-bit activations and gives every request the same
bits at any concurrency; llama.cpp computes with 8-bit activations.

{markdown(rows)}"""


def publish(report: Mapping[str, Any], docs: Path) -> list[Path]:
    """Writes docs/measurements/peers-CPU.json, docs/peers.md and docs/images/peers.svg."""
    rows = [Row.from_json(row) for row in report["rows"]]
    name = slug(report["machine"]["processor"])
    figures = docs / "measurements" / f"peers-{name}.json"
    picture = docs / "images" / "peers.svg"
    text = docs / "peers.md"
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(report, indent=1) + "\n")
    title = f"{report['model']} on {report['machine']['processor']}"
    draw(curves(rows), title, picture)
    relative = [str(path.relative_to(docs)) for path in (figures, picture)]
    text.write_text(page(report, rows, *relative))
    return [figures, picture, text]
