"""What launchd sees of a service: a refused configuration is noted, and is no failure."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler_service.service_manager.runner import read_record

RUNNER = [sys.executable, "-P", "-m", "scheduler_service.service_manager.runner"]


def _run(record: Path, *command: str) -> int:
    return subprocess.run(
        [*RUNNER, "--record", str(record), "--", *command], check=False
    ).returncode


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 1", 1), ("exit 78", 0), ("kill -9 $$", 137)],
)
def test_exit_codes(tmp_path: Path, script: str, code: int) -> None:
    record = tmp_path / "logs" / "executor.refused.json"
    assert _run(record, "/bin/sh", "-c", script) == code
    assert record.exists() == (script == "exit 78")
    assert ("(exit code 78)" in read_record(record)) == (script == "exit 78")


def test_a_note_goes_with_the_next_start(tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    assert _run(record, "/bin/sh", "-c", "exit 78") == 0
    assert record.exists()
    assert _run(record, "/bin/sh", "-c", "exit 0") == 0
    assert not record.exists()


def test_the_real_scheduler_refuses_a_real_configuration(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[scheduler]\nmetrics_prt = 1\n")
    record = tmp_path / "r.json"
    command = (sys.executable, "-P", "-m", "scheduler_service", "--config", str(config))
    assert _run(record, *command) == 0
    assert record.exists()


def test_signals_reach_the_service(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.05; done"
    command = [*RUNNER, "--record", str(tmp_path / "r"), "--", "/bin/sh", "-c", script]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_wrong_usage() -> None:
    done = subprocess.run([*RUNNER, "--oops"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Usage" in done.stderr
