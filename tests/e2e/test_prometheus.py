"""A real Prometheus over both services under load: every panel and every alert has an answer.

What this cannot show is how Grafana draws: Grafana itself is not run anywhere here.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus_server import (
    BOARD,
    RULES,
    PrometheusServer,
    is_shown,
    prometheus_server,
)
from tests.support.services import running_pair
from tests.support.steady_load import Load, steady_load
from tests.support.tiny_model import Storage, write_directory
from tests.support.tiny_pair import EXECUTOR_FLAGS, SHAPE, free_port

PROMETHEUS = shutil.which("prometheus")
WATCHED_SECONDS = 8.0
REST_SECONDS = 20.0
DOCUMENT: dict[str, Any] = json.loads(BOARD.read_text())
PANELS: list[dict[str, Any]] = [each for each in DOCUMENT["panels"] if each["type"] != "row"]
QUERIES = [(panel["title"], each["expr"]) for panel in PANELS for each in panel["targets"]]
VARIABLES: list[dict[str, Any]] = [
    each for each in DOCUMENT["templating"]["list"] if each["type"] == "query"
]


def rules(name: str, key: str) -> list[tuple[str, str]]:
    """Name and expression of every rule of a file."""
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [(rule[key], rule["expr"]) for group in groups for rule in group["rules"]]


ALERTS = rules("alerts.yml", "alert")
RECORDS = rules("recording_rules.yml", "record")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True, slots=True)
class Watched:
    """A pair under load, and the Prometheus that watches it."""

    server: PrometheusServer
    ports: dict[str, int]
    load: Load


@contextlib.contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Keep what the executor measures out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(folder))
        yield


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Both services under load for some seconds; the load goes on during the tests."""
    folder = tmp_path_factory.mktemp("prometheus")
    write_directory(folder / "model", SHAPE, Storage(4))
    ports = {"isobatch-scheduler": free_port(), "isobatch-executor": free_port()}
    port = free_port()
    assert PROMETHEUS is not None
    with (
        cache_folder(folder / "cache"),
        running_pair(
            folder / "model",
            # The cost curve is among what the panels show.
            executor_flags=(
                *EXECUTOR_FLAGS,
                "--profile",
                "measure",
                "--metrics-port",
                str(ports["isobatch-executor"]),
            ),
            scheduler_flags=("--metrics-port", str(ports["isobatch-scheduler"])),
        ) as pair,
        prometheus_server(PROMETHEUS, folder, port, ports) as server,
    ):
        # The first scrape sees both at rest: rates over all that was seen begin with zeros.
        deadline = time.monotonic() + REST_SECONDS
        while server.values('up{job=~"isobatch-.*"}') != [1.0, 1.0]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with steady_load(pair.schedulers[0].address) as load:
            time.sleep(WATCHED_SECONDS)
            yield Watched(server, ports, load)
            assert load.errors == []
            assert load.num_answers > 0


def substituted(expr: str) -> str:
    """Put in what Grafana would: all of each variable, a window of some scrapes."""
    expr = expr.replace("$__rate_interval", "6s")
    return re.sub(r"\$(?:scheduler|executor|model)\b", ".*", expr)


def always_answered(expr: str) -> str:
    """Turn comparisons that leave values out into ones that answer 0 or 1."""
    return re.sub(r" (==|!=|<=|>=|<|>) ", r" \1 bool ", expr)


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_a_panel_shows_something(watched: Watched, title: str, expr: str) -> None:
    assert is_shown(watched.server.values(substituted(expr)))


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda each: str(each["name"]))
def test_a_variable_offers_something(watched: Watched, variable: dict[str, Any]) -> None:
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
    assert found is not None
    metric, label = found.groups()
    assert watched.server.get(f"label/{label}/values", **{"match[]": metric})


@pytest.mark.parametrize("name", ["scheduler", "executor"])
def test_a_choice_empties_no_panel_of_the_other_process(watched: Watched, name: str) -> None:
    instance = f"127.0.0.1:{watched.ports[f'isobatch-{name}']}"
    for title, expr in QUERIES:
        chosen = substituted(expr.replace(f"${name}", instance))
        assert is_shown(watched.server.values(chosen)), title


@pytest.mark.parametrize(("name", "expr"), ALERTS)
def test_an_alert_has_something_to_look_at(watched: Watched, name: str, expr: str) -> None:
    values = watched.server.values(always_answered(expr))
    assert is_shown(values)
    assert set(values) <= {0.0, 1.0}


@pytest.mark.parametrize(("name", "expr"), RECORDS)
def test_a_recorded_value_is_there(watched: Watched, name: str, expr: str) -> None:
    assert is_shown(watched.server.values(name))
    assert is_shown(watched.server.values(expr))


def test_nothing_is_wrong_with_a_healthy_pair(watched: Watched) -> None:
    # Alerts of severity "info" judge durations, which a busy machine alone makes long.
    labels = [each["labels"] for each in watched.server.get("alerts")["alerts"]]
    found = {each["alertname"] for each in labels if each["severity"] != "info"}
    assert found - {"IsobatchThrottled"} == set()


@pytest.mark.parametrize("job", ["isobatch-scheduler", "isobatch-executor"])
def test_a_scrape_under_load_is_short(watched: Watched, job: str) -> None:
    """What a scrape costs is measured by tests/bench/bench_metrics.py, not here."""
    url = f"http://127.0.0.1:{watched.ports[job]}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        text = page.read().decode()
    assert len(text.splitlines()) <= 500


def test_the_rules_are_loaded(watched: Watched) -> None:
    groups = watched.server.get("rules")["groups"]
    found = {rule["name"] for group in groups for rule in group["rules"]}
    assert found == {name for name, _ in (*ALERTS, *RECORDS)}
    assert all(rule["health"] == "ok" for group in groups for rule in group["rules"])


# The last test: while it looks, nothing is asked, and for a while after that panels are empty.
def test_the_phases_of_both_processes_account_for_their_time(watched: Watched) -> None:
    """To the microsecond at rest; amid a step a scrape may come between its phases and its time."""

    def gaps() -> list[float]:
        # Requests that run are counted among the gaps: all is to be closed while none does.
        return [
            *watched.server.values("isobatch_scheduler_requests_running"),
            *watched.server.values("isobatch:step_phases:gap5m"),
            *watched.server.values(
                'sum(isobatch_executor_step_phase_seconds_sum{phase="forward"})'
                " - sum(isobatch_executor_forward_seconds_sum)"
            ),
        ]

    assert watched.server.values("isobatch_scheduler_step_wall_seconds_total")[0] > 0
    with watched.load.paused():
        deadline = time.monotonic() + REST_SECONDS
        while not _are_closed(found := gaps()) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert _are_closed(found), found


def _are_closed(gaps: list[float]) -> bool:
    return len(gaps) == 3 and all(abs(gap) < 1e-6 for gap in gaps)
