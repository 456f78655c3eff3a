"""Scrape configuration, rules and alerts, by Prometheus's own tool; and the metrics they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.contract.test_expositions import executor_page, scheduler_page

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
DEPLOY = FOLDER.parent
COMPARISON = re.compile(r" (==|!=|<=|>=|<|>) ")


def rules(name: str) -> list[dict[str, Any]]:
    """All rules of a file."""
    document = yaml.safe_load((FOLDER / name).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


ALERTS, RECORDS = rules("alerts.yml"), rules("recording_rules.yml")


@pytest.mark.parametrize("arguments", ["check config prometheus.yml", "test rules rules_test.yml"])
def test_promtool(arguments: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        [promtool, *arguments.split()], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_say_what_to_do() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names)) >= 10
    for alert in ALERTS:
        assert alert["alert"].startswith("Isobatch")
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(alert["annotations"]) == {"summary", "action"}
        assert COMPARISON.search(alert["expr"])
        assert not re.search(r"[^ ](==|!=|<=|>=|<|>) ", alert["expr"])


def test_every_alert_has_a_case() -> None:
    cases = (FOLDER / "rules_test.yml").read_text()
    for alert in ALERTS:
        assert re.search(rf"\b{alert['alert']}\b", cases), alert["alert"]


def test_rules_name_metrics_that_exist() -> None:
    pages = scheduler_page() + executor_page()
    exposed = set(re.findall(r"^# TYPE (\w+)", pages, re.MULTILINE))
    recorded = {rule["record"] for rule in RECORDS}
    for rule in (*ALERTS, *RECORDS):
        promql_parser.parse(rule["expr"])
        for name in re.findall(r"\bisobatch[_:][\w:]+", rule["expr"]):
            bare = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in recorded or bare in exposed, name


def test_the_other_files_are_yaml_and_point_at_each_other() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source
    provider = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/isobatch.yaml").read_text()
    )
    target = provider["providers"][0]["options"]["path"]
    assert any(f":{target}:" in each for each in compose["services"]["grafana"]["volumes"])
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    interval = source["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == scrape["global"]["scrape_interval"]
