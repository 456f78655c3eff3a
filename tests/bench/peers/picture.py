"""Throughput over concurrency, ours and the peers', as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Rates of all rounds by number of streams.
Curve = Mapping[int, Sequence[float]]
_COLOURS: Final = ("#1f5fbf", "#c2571a", "#7a7a7a", "#3f8f4f")


def draw(curves: Mapping[str, Curve], title: str, target: Path) -> None:
    """Writes the median of every curve with a band from worst to best; the format is the suffix."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), constrained_layout=True)
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        streams = sorted(curve)
        medians = [statistics.median(curve[n]) for n in streams]
        axes.fill_between(
            streams,
            [min(curve[n]) for n in streams],
            [max(curve[n]) for n in streams],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(streams, medians, marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({n for curve in curves.values() for n in curve})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens a second, all streams together")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No date inside: the same figures give the same file.
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
