"""Debian's Prometheus over a pair of services, with the committed configuration and rules."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
RULES: Final = ROOT / "deploy" / "prometheus"
BOARD: Final = ROOT / "deploy" / "grafana" / "dashboards" / "isobatch.json"
START_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running server's HTTP interface."""

    url: str

    def get(self, path: str, **values: str | float) -> Any:
        """Return the `data` of an answer; raises for any error."""
        query = urllib.parse.urlencode(values)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def values(self, expr: str) -> list[float]:
        """Return the values that an instant query gives."""
        return [float(each["value"][1]) for each in self.get("query", query=expr)["result"]]

    def series(
        self, expr: str, start: float, end: float, step: float = 1.0
    ) -> list[tuple[dict[str, str], list[float], list[float]]]:
        """Return labels, times and values of each line of a range query."""
        result = self.get("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [
            (
                line["metric"],
                [float(at) for at, _ in line["values"]],
                [float(value) for _, value in line["values"]],
            )
            for line in result
        ]


def is_shown(values: list[float]) -> bool:
    """Whether a panel with these values shows something."""
    return bool(values) and not all(math.isnan(each) for each in values)


def configuration(ports: Mapping[str, int]) -> dict[str, Any]:
    """Return the committed configuration for other ports (by job), once a second."""
    document: dict[str, Any] = yaml.safe_load((RULES / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document["rule_files"] = [str(RULES / name) for name in document["rule_files"]]
    for job in document["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    return document


@contextlib.contextmanager
def prometheus_server(
    program: str, folder: Path, port: int, ports: Mapping[str, int]
) -> Iterator[PrometheusServer]:
    """Run Prometheus on a loopback port for the time of the block."""
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(configuration(ports)))
    address = f"127.0.0.1:{port}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_ready(f"http://{address}/-/ready", process, log)
        yield PrometheusServer(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"[prometheus] it must start, got:\n{log.read_text()[-2000:]}")
