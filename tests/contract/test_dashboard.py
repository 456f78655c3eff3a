"""The committed dashboard: made by its script, and without the faults that dashboards have.

The rules are those of Grafana's dashboard linter that matter here, in our own words.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from deploy.grafana import panels
from tests.contract.test_expositions import executor_page, scheduler_page

ROOT = Path(__file__).resolve().parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/isobatch.json").read_text())
PANELS: list[dict[str, Any]] = [each for each in BOARD["panels"] if each["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in BOARD["templating"]["list"]}
# What Prometheus or the processes themselves add.
GENERAL = {
    "up", "scrape_duration_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total",
}  # fmt: skip


def targets() -> list[tuple[str, str]]:
    """Title and expression of every query."""
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def test_the_committed_file_is_what_the_script_gives() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.grafana.generate", "--check"], cwd=ROOT, check=False
    )
    assert done.returncode == 0


def test_it_is_whole() -> None:
    assert BOARD["uid"] == "isobatch"
    assert BOARD["editable"] is False
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in PANELS]
    assert len(titles) == len(set(titles)) == sum(len(row.panels) for row in panels.ROWS)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_variables_stand_alone() -> None:
    """A choice of one must not change what another offers."""
    assert set(VARIABLES) == {"datasource", "scheduler", "executor", "model"}
    assert VARIABLES["datasource"]["type"] == "datasource"
    for name in ("scheduler", "executor", "model"):
        variable = VARIABLES[name]
        assert "$" not in variable["query"]
        assert variable["includeAll"]
        assert variable["multi"]
        assert variable["allValue"] == ".*"
        assert variable["current"]["value"] == "$__all"


@pytest.mark.parametrize(("title", "expr"), targets())
def test_an_expression_is_sound(title: str, expr: str) -> None:
    promql_parser.parse(expr.replace("$__rate_interval", "1m"))
    for window in re.findall(r"\[([^\]]+)\]", expr):
        assert window == "$__rate_interval"
    for name in re.findall(r"\b\w+(?:_total|_bucket|_sum|_count)\b", expr):
        assert re.search(rf"(rate|increase)\({name}\b", expr), f"{name} must be in a rate"
    for used in re.findall(r"\$(\w+)", expr):
        assert used == "__rate_interval" or used in VARIABLES
    # Nobody divides by zero.
    assert all(
        part.lstrip().startswith("clamp_min(") for part in re.split(r" / (?!ignoring)", expr)[1:]
    )


@pytest.mark.parametrize(("title", "expr"), targets())
def test_a_metric_is_chosen_by_the_variable_of_its_own_process(title: str, expr: str) -> None:
    for owner, labels in re.findall(r"isobatch_(scheduler|executor)_\w+\{([^}]*)\}", expr):
        assert f'instance=~"${owner}"' in labels
        other = "executor" if owner == "scheduler" else "scheduler"
        assert f"${other}" not in labels


def test_every_metric_of_the_dashboard_exists_and_every_metric_is_shown() -> None:
    exposed = set(re.findall(r"^# TYPE (\w+)", scheduler_page() + executor_page(), re.MULTILINE))
    ours = {name for name in exposed if name.startswith("isobatch_")}
    used = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, expr in targets()
        for name in re.findall(r"\b(\w+)\{", expr)
    }
    assert used - ours == GENERAL
    assert ours - used == {"isobatch_executor_self_test_cases"}
