"""The picture of a simulation: how many first tokens and gaps took longer than how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
# The same data give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "isobatch", "svg.fonttype": "none", "font.size": 9})

import matplotlib.pyplot as plt  # noqa: E402 - the renderer comes first

from tests.bench.simulation.report import percentile  # noqa: E402

Series = Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]
"""Workload, then policy: the times to first token and the gaps, in seconds."""

# Shares of those that took longer: all of them down to one in ten thousand.
_LONGER = [10 ** (-each / 100) for each in range(0, 401, 3)]
_COLOURS = ("#0b6e4f", "#5fb49c", "#c8553d", "#8d6a9f", "#7d8597")


def draw(series: Series, path: Path) -> None:
    """Write an SVG with a row of two pictures for each workload."""
    figure, axes = plt.subplots(
        len(series), 2, figsize=(9, 2.5 * len(series)), squeeze=False, layout="constrained"
    )
    titles = ("time to first token, s", "gap between tokens, s")
    for row, (workload, policies) in zip(axes, series.items(), strict=True):
        for index, axis in enumerate(row):
            for colour, (policy, values) in zip(_COLOURS, policies.items(), strict=False):
                ordered = sorted(values[index])
                times = [max(1e-3, percentile(ordered, 1 - share)) for share in _LONGER]
                axis.plot(times, [share * 100 for share in _LONGER], color=colour, label=policy)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.minorticks_off()
            axis.set_ylim(0.01, 120)
            axis.grid(alpha=0.3)
            axis.set_title(f"{workload}: {titles[index]}", fontsize=9)
        row[0].set_ylabel("% longer than that")
    axes[0][1].legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
