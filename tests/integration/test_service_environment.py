"""Both services as launchd would run them: its environment and no more, its signals, its rules."""

from __future__ import annotations

import os
import plistlib
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from scheduler_service.client import Client, GenerationParams
from scheduler_service.service_manager.launchd import Launchd
from scheduler_service.service_manager.spec import make_specs
from tests.support.fake_tools import FakeTool
from tests.support.scheduler_harness import socket_folder
from tests.support.services import wait_serving
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size


@contextmanager
def _job(content: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Run a property list's program with its environment and output files."""
    job: dict[str, Any] = plistlib.loads(content)
    with Path(job["StandardErrorPath"]).open("ab") as stream:
        process = subprocess.Popen(
            job["ProgramArguments"], env=job["EnvironmentVariables"],
            cwd=job["WorkingDirectory"], umask=job["Umask"], stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        # As launchd does, with all that the job has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _jobs(folder: Path, config: Path) -> tuple[bytes, bytes]:
    """The property lists of executor and scheduler."""
    environ = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    specs = make_specs(config, folder, environ)
    executor, scheduler = Launchd(folder, FakeTool()).files(specs).values()
    return executor, scheduler


def test_they_serve_and_stop_when_told() -> None:
    with socket_folder() as folder, ExitStack() as stack:
        write_directory(folder / "tiny", TinyShape(vocab_size=vocab_size()), Storage(4))
        config = folder / "c.toml"
        config.write_text(
            f'[scheduler]\nmetrics_port = 0\n[executor]\nmodel = "{folder}/tiny"\n'
            "metrics_port = 0\nkv_memory_mb = 1\nthreads = 1\n"
        )
        executor, scheduler = (stack.enter_context(_job(each)) for each in _jobs(folder, config))
        address = f"unix:{folder}/isobatch/scheduler.sock"
        wait_serving(address, scheduler, folder / "scheduler.log")
        with Client(address) as client:
            params = GenerationParams(max_tokens=3, ignore_eos=True)
            answer = client.complete("one two", params)
            assert answer.usage.num_generated_tokens == 3
        # At logout both are asked at once.
        for process in (executor, scheduler):
            process.send_signal(signal.SIGTERM)
        assert [scheduler.wait(30), executor.wait(30)] == [0, 0]
        for name in ("scheduler", "executor"):
            assert '"event": "serving"' in (folder / f"{name}.log").read_text()
            assert (folder / f"{name}.log").stat().st_mode & 0o077 == 0


def test_a_model_that_is_not_there_is_refused_once() -> None:
    """Exit code 0 is what keeps launchd from trying again; the reason is kept."""
    with socket_folder() as folder:
        config = folder / "c.toml"
        config.write_text(f'[executor]\nmodel = "{folder}/gone.gguf"\nmetrics_port = 0\n')
        executor, _ = _jobs(folder, config)
        with _job(executor) as process:
            assert process.wait(60) == 0
        assert (folder / "executor.refused.json").exists()
        assert "gone.gguf" in (folder / "executor.output.log").read_text()
        system = Launchd(folder, FakeTool())
        path = next(iter(system.files(make_specs(config, folder, os.environ))))
        path.parent.mkdir(parents=True)
        path.write_bytes(executor)
        (status,) = system.status(["executor"])
        assert status.refused.startswith("configuration refused at ")


def test_a_killed_service_is_a_crash_to_launchd() -> None:
    with socket_folder() as folder:
        config = folder / "c.toml"
        config.write_text("[scheduler]\nmetrics_port = 0\n")
        _, scheduler = _jobs(folder, config)
        with _job(scheduler) as process:
            path = folder / "isobatch" / "scheduler.sock"
            deadline = time.monotonic() + 60
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            children = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True,
                check=True,
            )  # fmt: skip
            os.kill(int(children.stdout), signal.SIGKILL)
            assert process.wait(30) == 128 + signal.SIGKILL
