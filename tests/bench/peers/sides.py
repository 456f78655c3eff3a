"""The two sides of the comparison, each driven from processes of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.build import Llama
from tests.bench.peers.figures import Figures
from tests.bench.peers.prompts import Load

HERE: Final = Path(__file__).resolve().parent
START_SECONDS: Final = 120.0
ROUND_SECONDS: Final = 300.0
MATMUL_REPETITIONS: Final = 7


def run_load(script: str, target: str, load: Load) -> Figures:
    """Runs a load generator in its own process; `target` is an address or a port."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), target],
        input=json.dumps(load.to_json()),
        capture_output=True,
        text=True,
        check=False,
        timeout=ROUND_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"[bench] {script} failed:\n{done.stderr[-2000:]}")
    return Figures(**json.loads(done.stdout))


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def llama_server(
    llama: Llama, model: Path, *, threads: int, slots: int, context: int, log: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A llama-server with `slots` slots of `context` tokens each; yields its port and process."""
    port = free_port()
    command = [
        llama.program("llama-server"), "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--threads", str(threads), "--parallel", str(slots),
        "--ctx-size", str(slots * context), "--cache-ram", "0", "--no-webui", "--offline",
    ]  # fmt: skip
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        _wait_healthy(port, process, log)
        yield port, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"[bench] llama-server is not healthy:\n{log.read_text()[-2000:]}")


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=ROUND_SECONDS
    ).stdout


def llama_bench(llama: Llama, model: Path, threads: int, lengths: list[int]) -> dict[int, float]:
    """One repetition of llama-bench: tokens a second of prefill by prompt length."""
    text = _output(
        [
            llama.program("llama-bench"), "--model", str(model), "--threads", str(threads),
            "--n-prompt", ",".join(map(str, lengths)), "--n-gen", "0", "--repetitions", "1",
            "--output", "json",
        ]
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(text)
    return {int(row["n_prompt"]): float(row["avg_ts"]) for row in found}


def batched_bench(
    llama: Llama, model: Path, threads: int, *, streams: int, prompt: int, tokens: int
) -> float:
    """One run of llama-batched-bench: tokens a second of decode over `streams` streams."""
    text = _output(
        [
            llama.program("llama-batched-bench"), "--model", str(model),
            "--threads", str(threads), "--ctx-size", str(streams * (prompt + tokens)),
            "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(streams),
            "--output-format", "jsonl",
        ]
    )  # fmt: skip
    row = next(line for line in text.splitlines() if line.startswith("{"))
    return float(json.loads(row)["speed_tg"])


def engine_prefill(model: Path, threads: int, lengths: list[int]) -> dict[int, float]:
    """Our engine without services, one repetition: tokens a second of prefill by length."""
    text = _output(
        [
            sys.executable, str(HERE / "engine_prefill.py"), str(model),
            "--threads", str(threads), "--lengths", ",".join(map(str, lengths)),
        ]
    )  # fmt: skip
    return {int(length): float(rate) for length, rate in json.loads(text).items()}


def mlx_lm(
    python: Path, model: Path, *, streams: int, prompt: int, tokens: int
) -> dict[str, float]:
    """One run of mlx-lm in its own environment: tokens a second of `prefill` and `decode`."""
    text = _output(
        [
            str(python), str(HERE / "mlx_lm_side.py"), str(model), "--streams", str(streams),
            "--prompt", str(prompt), "--tokens", str(tokens),
        ]
    )  # fmt: skip
    return {name: float(rate) for name, rate in json.loads(text)[str(streams)].items()}


def matmuls(llama: Llama, threads: int, counts: list[int]) -> tuple[dict[int, float], ...]:
    """Ours, ours with 8-bit activations, ggml's: median milliseconds of a step's products by rows.

    One process each.
    """
    repetitions = str(MATMUL_REPETITIONS)
    ours = [
        sys.executable, str(HERE / "engine_matmuls.py"), ",".join(map(str, counts)),
        "--threads", str(threads), "--repetitions", repetitions,
    ]  # fmt: skip
    theirs = [str(llama.matmuls), str(threads), repetitions, *map(str, counts)]
    return tuple(
        {int(rows): statistics.median(times) for rows, times in json.loads(_output(c)).items()}
        for c in (ours, [*ours, "--activations", "8"], theirs)
    )
