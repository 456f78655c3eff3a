"""Draws what Prometheus recorded of both services under a load that rises and falls.

Usage: python tests/bench/metrics_picture.py TARGET.png   (needs Debian's prometheus)

The expressions are those of the Grafana dashboard; Grafana itself has no part in the picture.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import matplotlib  # noqa: E402 - the root comes first

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from deploy.grafana.panels import ROWS, Kind, Panel  # noqa: E402
from tests.support.embedded_model import embedded_model_path  # noqa: E402
from tests.support.prometheus_server import PrometheusServer, prometheus_server  # noqa: E402
from tests.support.services import running_pair  # noqa: E402
from tests.support.steady_load import steady_load  # noqa: E402
from tests.support.tiny_pair import free_port  # noqa: E402

# Streams at once, one after the other.
LEVELS: Final = (1, 4, 8, 16, 4, 1)
DRAWN: Final = (
    "Tokens", "Concurrency", "Time to first token", "Inter-token latency",
    "Where the scheduler's time goes", "Kernel path share of linear layers",
    "Rows per dispatch", "Effective weight bandwidth", "Blocks",
)  # fmt: skip
WORDS: Final = "The river runs from the hills to the sea, past seven towns. "
SCALES: Final = {"Bps": (1e9, "GB/s"), "s": (1.0, "s"), "percentunit": (1.0, "share")}


def main() -> int:
    """Watch a pair for as long as asked, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each level of load")
    options = parser.parse_args()
    program = shutil.which("prometheus")
    if program is None:
        print("prometheus must be installed (Debian: apt-get install prometheus)", file=sys.stderr)
        return 1
    ports = {"isobatch-scheduler": free_port(), "isobatch-executor": free_port()}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = stack.enter_context(
            running_pair(
                embedded_model_path(),
                executor_flags=(
                    "--kv-memory-mb",
                    "64",
                    "--metrics-port",
                    str(ports["isobatch-executor"]),
                ),
                scheduler_flags=("--metrics-port", str(ports["isobatch-scheduler"])),
            )
        )
        server = stack.enter_context(prometheus_server(program, folder, free_port(), ports))
        time.sleep(3)
        started = time.time()
        for level in LEVELS:
            address = pair.schedulers[0].address
            with steady_load(address, num_streams=level, max_tokens=64, prompt=WORDS) as load:
                time.sleep(options.seconds)
            if load.errors:
                raise load.errors[0]
        draw(server, started, time.time(), options.target)
    return 0


def draw(server: PrometheusServer, start: float, end: float, target: Path) -> None:
    """Write the picture."""
    panels = {panel.title: panel for row in ROWS for panel in row.panels}
    figure, axes = plt.subplots(3, 3, figsize=(15, 9.5), constrained_layout=True)
    for axis, title in zip(axes.flat, DRAWN, strict=True):
        _draw_panel(axis, panels[title], server, start, end)
    levels = ", ".join(map(str, LEVELS))
    figure.suptitle(
        "isobatch: SmolLM2-135M-Instruct (Q4_1) on a Linux virtual machine, 2 cores shared with "
        f"other work; streams at once: {levels}.\n"
        "Drawn from Prometheus with the dashboard's expressions (Grafana was not run).",
        fontsize=11,
    )
    figure.savefig(target, dpi=80, metadata={"Software": ""})
    print(f"wrote {os.fspath(target)}")


def _draw_panel(
    axis: Any, panel: Panel, server: PrometheusServer, start: float, end: float
) -> None:
    scale, unit = SCALES.get(panel.unit, (1.0, ""))
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", "6s")
        expr = re.sub(r"\$(?:scheduler|executor|model)\b", ".*", expr)
        for labels, times, values in server.series(expr, start, end):
            name = query.legend
            for label, value in labels.items():
                shown = "" if label == "model" else value
                name = name.replace("{{" + label + "}}", shown)
            name = name.strip() or "value"
            lines[name] = ([at - start for at in times], [value / scale for value in values])
    if panel.kind is Kind.STACKED and len({len(values) for _, values in lines.values()}) == 1:
        times = next(iter(lines.values()))[0]
        axis.stackplot(
            times, [values for _, values in lines.values()], labels=list(lines), alpha=0.8
        )
    else:
        for name, (times, values) in lines.items():
            axis.plot(times, values, label=name)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel(unit, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="upper right")


if __name__ == "__main__":
    sys.exit(main())
