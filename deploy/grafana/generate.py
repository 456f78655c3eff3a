"""Writes the Grafana dashboard from `panels`.

Usage, in the repository's root: python -m deploy.grafana.generate [--check]
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.panels import ROWS, VARIABLES, Kind, Panel, Query

TARGET: Final = Path(__file__).parent / "dashboards" / "isobatch.json"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_ALL: Final = VariableOption(selected=True, text="All", value="$__all")
_WIDTH, _HEIGHT = 8, 8

_Builder = timeseries.Panel | heatmap.Panel | stat.Panel


def _query(query: Query, index: int, kind: Kind) -> prometheus.Dataquery:
    built = (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + index))
        .datasource(_SOURCE)
    )
    if kind is Kind.HEATMAP:
        return built.format(PromQueryFormat.HEATMAP).range()
    return built.instant() if kind is Kind.STAT else built.range()


def _drawing(kind: Kind) -> _Builder:
    if kind is Kind.HEATMAP:
        return heatmap.Panel().calculate(False).show_legend()
    if kind is Kind.STAT:
        return stat.Panel().text_mode(BigValueTextMode.VALUE_AND_NAME)
    lines = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .min(0)
    )
    if kind is Kind.STACKED:
        lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    return lines


def _panel(panel: Panel, number: int) -> _Builder:
    built = _drawing(panel.kind)
    built.id(number).title(panel.title).description(panel.description).unit(panel.unit)
    built.datasource(_SOURCE).span(_WIDTH).height(_HEIGHT)
    for index, query in enumerate(panel.queries):
        built.with_target(_query(query, index, panel.kind))
    return built


def render() -> str:
    """Return the dashboard as JSON."""
    board = (
        dashboard.Dashboard("isobatch")
        .uid("isobatch")
        .description(
            "Both services of isobatch: throughput, latency, steps, kernels, cache, health."
        )
        .tags(["isobatch"])
        .readonly()
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name, label, query in VARIABLES:
        board.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
            .datasource(_SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(_ALL)
        )
    numbers = itertools.count(1)
    for row in ROWS:
        board.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            board.with_panel(_panel(panel, next(numbers)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    """Write the file, or with --check compare it; return the exit code."""
    text = render()
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() == text:
            return 0
        print(f"{TARGET.name} is not what panels.py gives: python -m deploy.grafana.generate")
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
