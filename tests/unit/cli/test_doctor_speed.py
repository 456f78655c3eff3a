"""The doctor's speed check: by a running executor's page, or measured against a stored profile."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest, start_http_server

from executor_service import doctor
from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import (
    Build,
    Capabilities,
    ModelDescription,
    SelfTestResult,
)
from executor_service.engine.engine import build_engine
from executor_service.engine.kernels import create_backend, self_test_of
from executor_service.engine.profile import Profile
from executor_service.engine.profile_store import ProfileKey, ProfileStore
from executor_service.engine.speed_check import SpeedResult
from executor_service.engine.weight_bytes import WeightBytes
from executor_service.metrics import Metrics
from executor_service.models.checkpoint import TokenizerData
from executor_service.models.registry import ModelLocation
from scheduler_service.cli import app
from scheduler_service.cli import doctor as cli_doctor
from tests.support.profiles import full_profile, profile_of
from tests.support.scheduler_harness import socket_folder
from tests.support.steps import LIMITS
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_pair import free_port

FLAGS: dict[str, Any] = {"metrics_port": 0, "kv_memory_mb": 1, "threads": 1, "max_num_seqs": 8}


def _metrics(profile: Profile, unit: str = "vnni") -> Metrics:
    capabilities = Capabilities(
        model=ModelDescription("toy", "llama", "X1", "00", 10, "toy.gguf", 16, 20),
        tokenizer=TokenizerData(b"{}", "", (), None, False, ()),
        limits=LIMITS,
        build=Build("0.1", "cpu", "a processor", unit, "0.32", 2),
        self_test=SelfTestResult(0, ()),
        profile=profile,
    )
    return Metrics(capabilities, 1, WeightBytes(1, 1))


@pytest.mark.parametrize(
    ("ratio", "unit", "state", "advice"),
    [
        (0.51, "vnni", "ok", ""),
        (0.49, "vnni", "warning", "processor"),
        (0.1, "cuda", "failed", "GPU"),
    ],
)
def test_a_running_executor_is_asked(ratio: float, unit: str, state: str, advice: str) -> None:
    metrics = _metrics(full_profile(), unit)
    port = free_port()
    server, thread = start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
    try:
        settings = ExecutorConfig(listen="unix:/unused/e.sock", metrics_port=port)
        (before,) = doctor.check_speed(settings)
        assert (before.state, "not been idle" in before.detail) == ("ok", True)
        metrics.profile.observe_speed(SpeedResult({1: 0.9, 8: ratio}, {}), time.time() - 600)
        (check,) = doctor.check_speed(settings)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert check.state == state
    assert f" min ago: 90% at 1 row, {ratio:.0%} at 8 rows" in check.detail
    assert advice in check.advice


def test_a_running_executor_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    page = generate_latest(_metrics(Profile()).registry).decode()
    monkeypatch.setattr(doctor, "_metrics_page", lambda _: page)
    (check,) = doctor.check_speed(ExecutorConfig(listen="unix:/unused/e.sock"))
    assert (check.state, check.detail) == ("ok", "the running executor has no profile")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model whose profile is stored in the cache folder beside it."""
    folder = tmp_path_factory.mktemp("speed")
    write_directory(folder / "tiny", TinyShape(num_layers=1), Storage(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(folder))
        yield folder / "tiny"


def _settings(model: Path) -> ExecutorConfig:
    return ExecutorConfig(listen="unix:/unused/e.sock", model=str(model), profile="auto", **FLAGS)


def test_without_a_profile_nothing_is_measured(model: Path) -> None:
    (check,) = doctor.check_speed(_settings(model))
    assert (check.state, "no stored profile yet" in check.detail) == ("ok", True)
    assert not (model.parent / "profiles").exists()


@pytest.mark.parametrize(
    ("nanoseconds", "state", "exit_code"), [(1, "warning", 0), (10**12, "ok", 0)]
)
def test_speed_now_against_the_stored_profile(
    model: Path, nanoseconds: int, state: str, exit_code: int
) -> None:
    settings = _settings(model)
    location = ModelLocation(model, "tiny")
    engine = build_engine(settings, location, create_backend, self_test_of("auto", "auto"))
    engine.close()
    key = ProfileKey(**json.loads(engine.profile_file.read_text())["key"])
    invented = profile_of((1, 1, 0, nanoseconds), (8, 8, 0, nanoseconds))
    ProfileStore(engine.profile_file.parent).write(key, invented)
    environment = {
        "ISOBATCH_CONFIG": os.devnull,
        "ISOBATCH_SCHEDULER_METRICS_PORT": "0",
        "ISOBATCH_EXECUTOR_MODEL": str(model),
        "ISOBATCH_EXECUTOR_PROFILE": "auto",
    } | {f"ISOBATCH_EXECUTOR_{name.upper()}": str(value) for name, value in FLAGS.items()}
    with socket_folder() as folder:
        environment["XDG_RUNTIME_DIR"] = str(folder)
        done = CliRunner().invoke(app.cli, ["doctor", "--json"], env=environment)
    assert done.exit_code == exit_code, done.output
    checks = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert checks["speed"]["state"] == state
    assert "at 1 row" in checks["speed"]["detail"]
    assert bool(checks["speed"]["advice"]) == (state == "warning")


def test_a_throttled_gpu_is_a_failure_with_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor._speed({1: 0.12, 8: 0.9}, "metal", "now")
    assert check.state == "failed"
    rows = [{key: str(value) for key, value in asdict(check).items()}]
    monkeypatch.setattr(cli_doctor, "executor", lambda _: rows)
    with socket_folder() as folder:
        environment = {"XDG_RUNTIME_DIR": str(folder), "ISOBATCH_SCHEDULER_METRICS_PORT": "0"}
        done = CliRunner().invoke(app.cli, ["doctor"], env=environment)
    assert done.exit_code == 1
    assert "FAILED  speed: throughput over that of the stored profile, now: 12% at 1 row" in (
        done.stdout
    )
