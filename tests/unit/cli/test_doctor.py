"""`isobatch doctor`: each finding, and the exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from executor_service import doctor as executor_doctor
from executor_service.config import ExecutorConfig
from scheduler_service.cli import app, doctor
from tests.support.scheduler_harness import socket_folder
from tests.support.tiny_model import Storage, TinyShape, write_directory


def _doctor(runtime: Path, *arguments: str, **more: str) -> Result:
    environment = {"XDG_RUNTIME_DIR": str(runtime), "ISOBATCH_CONFIG": os.devnull, **more}
    return CliRunner().invoke(app.cli, ["doctor", *arguments], env=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(folder, TinyShape(), Storage(4))
    return folder


@pytest.fixture
def variables(model: Path) -> dict[str, str]:
    """A configuration that is in order and disturbs nobody."""
    return {
        "ISOBATCH_EXECUTOR_MODEL": str(model),
        "ISOBATCH_EXECUTOR_METRICS_PORT": "0",
        "ISOBATCH_SCHEDULER_METRICS_PORT": "0",
    }


def test_a_machine_in_order(variables: dict[str, str]) -> None:
    with socket_folder() as folder:
        done = _doctor(folder, "--json", **variables)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["healthy"] is True
    checks = {each["name"]: each for each in document["checks"]}
    assert {
        "system", "python", "versions", "scheduler configuration", "scheduler socket",
        "executor socket", "scheduler metrics port", "executor configuration", "mlx",
        "native module", "self-test", "unit", "model", "memory", "executor metrics port",
    } <= checks.keys()  # fmt: skip
    assert all(each["state"] in ("ok", "warning") for each in checks.values())
    assert "cases equal" in checks["self-test"]["detail"]


def test_what_is_wrong_is_named_with_advice(variables: dict[str, str], tmp_path: Path) -> None:
    wrong = {
        "ISOBATCH_SCHEDULER_MAX_NUM_SEQ": "1",
        "ISOBATCH_EXECUTOR_MODEL": str(tmp_path / "gone.gguf"),
    }
    with socket_folder() as folder:
        done = _doctor(folder, **{**variables, **wrong})
    assert done.exit_code == 1
    assert "did you mean ISOBATCH_SCHEDULER_MAX_NUM_SEQS?" in done.stdout
    assert "FAILED  model: " in done.stdout
    assert "[model] the file must exist, got" in done.stdout
    assert "got scheduler configuration, model" in done.stderr


@pytest.mark.parametrize(
    ("model", "is_to_be_pulled"),
    [("smollm2-135m-instruct", True), ("owner/name", True), ("/gone/m.gguf", False),
     ("./gone", False), ("gone", False)],
)  # fmt: skip
def test_pull_is_advised_for_what_can_be_pulled(
    model: str, is_to_be_pulled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "ISOBATCH_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ExecutorConfig(listen=f"unix:{tmp_path}/s", model=model)
    (check,) = executor_doctor.check_model(settings)
    assert check.state == "failed"
    assert (check.advice == f"isobatch pull {model}") == is_to_be_pulled


def test_a_damaged_model_is_found_without_loading_it(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF\x03\x00")
    (check,) = [
        each for each in executor_doctor.run(["--model", str(file)]) if each.name == "model"
    ]
    assert check.state == "failed"
    assert "cut.gguf" in check.detail


def test_sockets() -> None:
    with socket_folder() as folder:
        path = folder / "s.sock"
        os.chmod(folder, 0o755)
        (shared,) = doctor.sockets("x", path)
        assert (shared["state"], "chmod 700" in shared["advice"]) == ("failed", True)
        os.chmod(folder, 0o700)
        assert "nobody serves" in doctor.sockets("x", path)[0]["detail"]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            os.chmod(path, 0o666)
            assert "left over" in doctor.sockets("x", path)[0]["detail"]
            server.listen()
            (open_,) = doctor.sockets("x", path)
            assert (open_["state"], open_["advice"]) == ("warning", f"chmod 600 {path}")
            os.chmod(path, 0o600)
            (served,) = doctor.sockets("x", path)
            assert (served["state"], served["advice"]) == ("ok", "")


def test_ports() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        number = server.getsockname()[1]
        server.listen()
        server.close()
        assert doctor.port("scheduler", number)["detail"] == f"{number} is free"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        taken = doctor.port("scheduler", server.getsockname()[1])
        assert (taken["state"], "another program" in taken["detail"]) == ("failed", True)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have a Metal device")
def test_the_metal_report_off_a_mac_says_what_to_do() -> None:
    """The real report in its own process: no device here, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_service.cli", "doctor", "--metal"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "No Metal device" in done.stderr
    assert "Run this on a Mac with Apple silicon" in done.stderr


@pytest.mark.parametrize(
    ("exit_code", "passed_on", "advice"),
    [(0, 0, ""), (1, 1, ""), (3, 3, "not under Rosetta"), (-9, 1, "")],
)
def test_the_metal_report_s_exit_code_is_passed_through(
    exit_code: int, passed_on: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Mac: right, wrong, no device, killed."""
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, exit_code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "platform", "darwin")
    done = CliRunner().invoke(app.cli, ["doctor", "--metal"])
    assert done.exit_code == passed_on
    assert advice in done.stderr
    assert bool(done.stderr) == bool(advice)
    assert [each[-1] for each in commands] == ["isobatch_kernels.metal.doctor"]


def test_the_metal_report_goes_alone() -> None:
    assert CliRunner().invoke(app.cli, ["doctor", "--metal", "--json"]).exit_code == 2


@pytest.mark.parametrize(
    ("has_gpu", "name", "state", "words"),
    [
        (False, "backend", "failed", "C++ compiler"),
        (True, "native module", "warning", "The GPU computes"),
    ],
)
def test_without_the_native_module(
    has_gpu: bool, name: str, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU can do without it; nothing else can."""
    monkeypatch.delenv("ISOBATCH_CPU_UNIT", raising=False)
    for module in ("_cpu", "cpu_backend", "self_test"):
        monkeypatch.setitem(sys.modules, f"isobatch_kernels.{module}", None)
        monkeypatch.delattr(f"isobatch_kernels.{module}", raising=False)
    monkeypatch.setattr("isobatch_kernels.dispatch.device_is_available", lambda _: has_gpu)
    (check,) = executor_doctor.check_kernels("auto", "auto")
    assert (check.name, check.state) == (name, state)
    assert words in check.advice


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[executor_doctor.Check]:
        raise RuntimeError("no GPU today")

    monkeypatch.setattr(executor_doctor, "check_mlx", broken)
    found = {each.name: each for each in executor_doctor.run(["--model", "/gone.gguf"])}
    assert found["mlx"].state == "failed"
    assert found["mlx"].detail == "RuntimeError: no GPU today"
