"""The executor as a process: start, metrics page, signals, refusals with exit code 78."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services import Service, start_executor
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import TinyShape

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")

SHAPE = TinyShape(num_layers=1, vocab_size=64)
FLAGS = ("--kv-memory-mb", "1", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, SHAPE, "Q4_1")
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's path has at most about 100 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ib-"))
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def _executor(folder: Path, model: Path, *flags: str) -> Iterator[Service]:
    service = start_executor(folder, model, *FLAGS, *flags)
    try:
        yield service
    finally:
        service.stop()


def _refused(*flags: str) -> str:
    """Runs a process that must end with 78 and returns what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "executor_service", "--metrics-port", "0", *flags],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_metrics_and_ends_on_a_signal(
    folder: Path, model: Path, number: signal.Signals
) -> None:
    port = _free_port()
    with _executor(folder, model, "--metrics-port", str(port)) as service:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        assert 'isobatch_executor_kv_blocks{model="tiny",state="free"}' in text
        assert len(text.splitlines()) <= 500
        assert service.stop(number) == 0
    assert not (folder / "x.sock").exists()


def test_a_signal_while_the_model_loads_ends_it_as_well(folder: Path, model: Path) -> None:
    path = folder / "x.sock"
    command = [sys.executable, "-m", "executor_service", "--metrics-port", "0", *FLAGS]
    command += ["--model", str(model), "--listen", f"unix:{path}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not path.exists() and process.poll() is None:
            time.sleep(0.002)
        process.terminate()
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, said


def test_takes_over_the_socket_of_a_killed_process_but_not_of_a_live_one(
    folder: Path, model: Path
) -> None:
    with _executor(folder, model) as first:
        said = _refused("--model", str(model), "--listen", first.address)
        assert "the socket must be free, got one that a process serves" in said
        assert first.process.poll() is None
        first.stop(signal.SIGKILL)
    assert (folder / "x.sock").exists()
    with _executor(folder, model) as second:
        assert second.stop() == 0


def test_a_model_that_is_not_here_names_the_command(folder: Path) -> None:
    said = _refused("--listen", f"unix:{folder}/x.sock")
    assert "Fetch it once with: isobatch pull smollm2-135m-instruct" in said


def test_a_damaged_model_is_named(folder: Path, model: Path) -> None:
    cut = folder / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-2000])
    said = _refused("--model", str(cut), "--listen", f"unix:{folder}/x.sock")
    assert "complete download" in said
    assert "cut.gguf" in said


def test_a_port_in_use_is_named(folder: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = _refused(
            "--model", str(model), "--listen", f"unix:{folder}/x.sock", *FLAGS,
            "--metrics-port", port,
        )  # fmt: skip
    assert f"metrics_port must be free, got {port}" in said


def test_a_cache_below_one_context_is_warned_of_with_the_memory_it_takes(folder: Path) -> None:
    model = folder / "long.gguf"
    write_gguf(model, TinyShape(num_layers=1, vocab_size=64, context_length=65536), "Q4_1")
    words = "cache holds less than one sequence of the model's whole context"
    with _executor(folder, model) as service:
        said = service.log.read_text()
    assert words in said
    found = re.search(r" kv_memory_mb_needed=(\d+)", said)
    assert found is not None
    for memory_mb, is_warned in ((int(found[1]), False), (int(found[1]) - 1, True)):
        with _executor(folder, model, "--kv-memory-mb", str(memory_mb)) as service:
            assert (words in service.log.read_text()) is is_warned


def test_bad_flags_are_refused() -> None:
    assert "--no-such-flag" in _refused("--no-such-flag")
    assert "max_num_seqs must be in" in _refused("--max-num-seqs", "0")


def test_importing_the_contract_side_loads_no_mlx() -> None:
    """The process answers before MLX is loaded; only the engine thread needs it."""
    code = "import sys, executor_service.models.pull; print('mlx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "False"
