"""`isobatch top`: what two readings say, and how it is shown."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scheduler_service.cli import app, scrape, top
from scheduler_service.cli.scrape import Change, parse

BEFORE = """
# HELP something
isobatch_scheduler_generated_tokens_total{model="m"} 100
isobatch_scheduler_step_phase_seconds_sum{model="m",phase="plan"} 1
isobatch_scheduler_step_phase_seconds_sum{model="m",phase="forward"} 1
isobatch_scheduler_time_to_first_token_seconds_bucket{le="0.1",model="m"} 5
isobatch_scheduler_time_to_first_token_seconds_bucket{le="0.5",model="m"} 5
isobatch_scheduler_time_to_first_token_seconds_bucket{le="+Inf",model="m"} 5
isobatch_executor_kernel_dispatches_total{op="linear",path="gemv",unit="vnni"} 10
isobatch_executor_kernel_dispatches_total{op="linear",path="gemm",unit="vnni"} 10
isobatch_executor_kernel_dispatches_total{op="embed",path="other",unit="vnni"} 10
isobatch_executor_kv_blocks{model="m",state="free"} 7
"""
NOW = """
isobatch_scheduler_generated_tokens_total{model="m"} 150
isobatch_scheduler_step_phase_seconds_sum{model="m",phase="plan"} 1.5
isobatch_scheduler_step_phase_seconds_sum{model="m",phase="forward"} 2.5
isobatch_scheduler_time_to_first_token_seconds_bucket{le="0.1",model="m"} 5
isobatch_scheduler_time_to_first_token_seconds_bucket{le="0.5",model="m"} 9
isobatch_scheduler_time_to_first_token_seconds_bucket{le="+Inf",model="m"} 9
isobatch_executor_kernel_dispatches_total{op="linear",path="gemv",unit="vnni"} 13
isobatch_executor_kernel_dispatches_total{op="linear",path="gemm",unit="vnni"} 11
isobatch_executor_kernel_dispatches_total{op="embed",path="other",unit="vnni"} 90
isobatch_executor_kv_blocks{model="m",state="free"} 6
"""


@pytest.fixture
def change() -> Change:
    return Change(parse(BEFORE, 10.0), parse(NOW, 12.0))


def test_a_summary_of_two_seconds(change: Change) -> None:
    found = scrape.summary(change, change)
    assert found["scheduler"]["generated_tokens_per_second"] == 25.0
    assert found["scheduler"]["step_phase_share"] == {"plan": 0.25, "forward": 0.75}
    # Four observations between 0.1 and 0.5 s.
    assert found["scheduler"]["time_to_first_token_seconds"]["p50"] == pytest.approx(0.3)
    assert found["scheduler"]["inter_token_latency_seconds"] == {"p50": None, "p95": None}
    assert found["executor"]["linear_path_share"] == {"gemv": 0.75, "gemm": 0.25}
    assert found["executor"]["kv_blocks"] == {"free": 6.0}
    assert found["executor"]["weight_bytes_per_second"] is None


def test_a_restart_is_no_negative_rate(change: Change) -> None:
    restarted = Change(change.now, parse(BEFORE, 14.0))
    assert restarted.rate("isobatch_scheduler_generated_tokens_total") == 0.0


def test_odd_lines() -> None:
    page = parse('a{b="x\\"y",c="}"} 1e3\nbroken\n# TYPE a gauge\nd 2\ne{} +Inf\n', 0.0)
    assert page.total("a", c="}") == 1000.0
    assert (page.total("d"), page.total("nothing")) == (2.0, 0.0)
    assert page.by("a", "c") == {"}": 1000.0}


@pytest.fixture
def port() -> Iterator[int]:
    """A page that grows with each reading."""

    class Handler(BaseHTTPRequestHandler):
        num_reads = 0

        def do_GET(self) -> None:
            Handler.num_reads += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write((BEFORE if Handler.num_reads == 1 else NOW).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_command(port: int) -> None:
    arguments = ["top", "--metrics-port", str(port), "--executor-metrics-port", "1"]
    done = CliRunner().invoke(app.cli, [*arguments, "--interval", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["scheduler"]["generated_tokens_per_second"] > 0
    assert found["executor"] is None
    shown = CliRunner().invoke(app.cli, [*arguments, "--interval", "0.1", "--once"])
    assert "does not answer" in shown.stdout
    assert "not connected" in shown.stdout


def test_ports_are_those_of_the_configuration(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "isobatch.toml"
    file.write_text(f"[scheduler]\nmetrics_port = 1\n[executor]\nmetrics_port = {port}\n")
    monkeypatch.setenv("ISOBATCH_CONFIG", str(file))
    done = CliRunner().invoke(app.cli, ["top", "--interval", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["scheduler"] is None
    assert found["executor"] is not None
    file.write_text("[scheduler]\nmetrics_port = 0\n")
    off = CliRunner().invoke(app.cli, ["top"])
    assert off.exit_code == 78
    assert "[top] the scheduler's metrics must be on, got metrics_port = 0" in off.stderr


def test_nobody_answers() -> None:
    arguments = ["top", "--metrics-port", "1", "--executor-metrics-port", "2", "--once"]
    done = CliRunner().invoke(app.cli, arguments)
    assert done.exit_code == 3
    assert "a metrics page must answer on port 1 or 2" in done.stderr
    assert "Start a server with `isobatch serve`." in done.stderr


def test_ctrl_c_is_how_one_leaves(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(ports: tuple[int, int], interval: float) -> Iterator[dict[str, Any]]:
        yield scrape.summary(change, change)
        yield scrape.summary(change, change)
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "watch", watch)
    arguments = ["top", "--metrics-port", "1", "--executor-metrics-port", "2"]
    done = CliRunner().invoke(app.cli, arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    # Without a terminal each interval is written when it is over, and nothing is drawn over.
    assert done.stdout.count("25.0 generated") == 2
    assert "\x1b" not in done.stdout
