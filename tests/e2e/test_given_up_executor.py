"""`isobatch serve` with an executor that cannot be started again: clients hear why, at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_service.client import Client, GenerationParams, UnavailableError
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

SHAPE = TinyShape(vocab_size=vocab_size(), context_length=4096)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ib-"))
    yield path
    shutil.rmtree(path)


def test_a_stream_ends_with_the_executors_own_error(folder: Path) -> None:
    """The model is gone when the executor that died is started again."""
    write_directory(folder / "model", SHAPE, Storage(4))
    address = f"unix:{folder}/s.sock"
    command = [
        sys.executable, "-m", "scheduler_service.cli", "serve", "--model", f"{folder}/model",
        "--listen", address, "--executor-socket", f"{folder}/x.sock", "--metrics-port", "0",
        "--executor-metrics-port", "0", "--threads", "1", "--kv-memory-mb", "1",
    ]  # fmt: skip
    # Far longer than the test may take, so that no deadline is what ends the stream.
    environment = {
        **os.environ,
        "ISOBATCH_SCHEDULER_DRAIN_SECONDS": "600",
        "ISOBATCH_SCHEDULER_RECOVERY_DEADLINE_SECONDS": "600",
    }
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as serve:
        assert serve.stderr is not None
        try:
            said = ""
            while f"isobatch serves on {address}" not in said:
                said += serve.stderr.readline()
                assert serve.poll() is None, said
            rest: list[str] = []
            reader = threading.Thread(target=rest.extend, args=(serve.stderr,))
            reader.start()
            with Client(address) as client:
                params = GenerationParams(max_tokens=3500, ignore_eos=True)
                stream = client.generate([5, 6, 7], params)
                next(stream)
                shutil.rmtree(folder / "model")
                (pid,) = _children(serve.pid, "executor_service")
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(UnavailableError) as caught:
                    stream.completion()
            assert serve.wait(60) == 78
            reader.join()
        finally:
            serve.kill()
    error = caught.value
    assert error.reason == "EXECUTOR_FAILED"
    assert error.retry_after_seconds is None
    words = "executor must keep running, got exit code 78; its last words: [model] "
    assert error.message.startswith(f"[supervisor] {words}")
    assert f"{folder}/model" in error.message
    assert any("executor_given_up" in line for line in rest)


def _children(parent: int, module: str) -> list[int]:
    """Return the processes of a parent that run a module."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"^\s*(\d+)\s+(\d+)\s+(.*)$", table.stdout, re.MULTILINE)
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and module in args]
