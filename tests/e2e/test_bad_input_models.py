"""Model files that cannot be served: refused by name with exit code 78, before weights are loaded.

A crash would show as the exit code of a signal.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executor_service.models.gguf_header import read_header
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import Storage, TinyShape, write_directory

SHAPE = TinyShape()
# Says for each model how the executor ended, and whether it had begun to load weights.
SCRIPT = """
import faulthandler, json, os, sys, tempfile
faulthandler.enable()
import mlx.core
# Everything that a child would have to import.
import executor_service.engine.kernels, executor_service.models.load, executor_service.server
from executor_service.__main__ import main
load = mlx.core.load
def noted(*args, **kwargs):
    print("LOADED", file=sys.stderr, flush=True)
    return load(*args, **kwargs)
mlx.core.load = noted
for path in json.load(sys.stdin):
    with tempfile.TemporaryDirectory(prefix="ib-") as folder:
        # Nothing has been started in this process, so a child may be forked; it is quick.
        child = os.fork()
        if child == 0:
            os._exit(main(["--model", path, "--listen", f"unix:{folder}/x.sock",
                           "--metrics-port", "0", "--kv-memory-mb", "1", "--threads", "1",
                           "--log-format", "json"]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("RESULT " + json.dumps([path, code]), file=sys.stderr, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A damaged model and what must be said of it."""

    make: Callable[[Path], Path]
    says: str
    # NaN hides in the weights themselves; everything else shows in headers and sizes.
    loads_weights: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How an executor ended."""

    code: int
    has_loaded: bool  # weights, or begun to
    said: str
    path: Path


def _gguf(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "m.gguf"
        write_gguf(path, SHAPE, "Q4_1")
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def _directory(
    change: Callable[[Path], None], storage: Storage | None = None
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_directory(folder / "m", SHAPE, storage or Storage(4))
        change(folder / "m")
        return folder / "m"

    return make


def _weights(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return _directory(edit)


def _header(**changes: Any) -> Callable[[Path], Path]:
    """Change an entry of the header: its first tensor's."""

    def edit(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        name = next(each for each in header if each != "__metadata__")
        header[name] |= changes
        raw = json.dumps(header).encode()
        return struct.pack("<Q", len(raw)) + raw + data[8 + size :]

    return _weights(edit)


def _config(**changes: Any) -> Callable[[Path], Path]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return _directory(edit)


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _nan_in_a_directory(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    tensors = mx.load(path)
    assert isinstance(tensors, dict)
    name = "model.layers.1.mlp.up_proj.weight"
    values = np.array(tensors[name])
    values[3, 4] = np.nan
    mx.save_safetensors(path, tensors | {name: mx.array(values)})


def _nan_in_a_gguf_scale(data: bytes) -> bytes:
    """A block of Q4_1 begins with its scale, and the embedding begins the tensors."""
    start = read_header(memoryview(data), "m.gguf").tensors["token_embd.weight"].offset
    return data[:start] + np.float16(np.nan).tobytes() + data[start + 2 :]


CASES: dict[str, Case] = {
    "gguf cut in its length field": Case(_gguf(lambda data: data[:10]), "must"),
    "gguf cut in its header": Case(_gguf(lambda data: data[:400]), "must fit in the file"),
    "gguf cut in a tensor": Case(_gguf(lambda data: data[:-9000]), "complete download"),
    "gguf cut by its last byte": Case(_gguf(lambda data: data[:-32]), "complete download"),
    "gguf that is empty": Case(_gguf(lambda _: b""), "must not be empty"),
    "gguf that is a web page": Case(_gguf(lambda _: b"<!DOCTYPE html><html>" * 50), "GGUF"),
    "gguf of another architecture": Case(
        _gguf(lambda data: data.replace(b"llama", b"mamba")), "must be one of llama, qwen2"
    ),
    "gguf with a huge count": Case(
        _gguf(lambda data: data[:8] + struct.pack("<Q", 2**63) + data[16:]), "must fit in the file"
    ),
    "gguf with a scale that is no number": Case(
        _gguf(_nan_in_a_gguf_scale), "must be finite", loads_weights=True
    ),
    "weights cut": Case(_weights(lambda data: data[:-7]), "complete download"),
    "weights with a header of nearly 2^63": Case(
        _weights(lambda data: struct.pack("<Q", 2**63 - 1) + data[8:]), "must fit in the file"
    ),
    "weights that are a pointer": Case(
        _weights(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "must fit in the file"
    ),
    "weights that are empty": Case(_weights(lambda _: b""), "must not be empty"),
    "weights of another type": Case(_header(dtype="F64"), "must be of type"),
    "weights outside the file": Case(_header(data_offsets=[2**40, 2**40 + 4]), "model.safetensors"),
    "weights that are no number": Case(
        _directory(_nan_in_a_directory, Storage(0)), "must be finite", loads_weights=True
    ),
    "no weights": Case(
        _directory(lambda folder: (folder / "model.safetensors").unlink()), "got none"
    ),
    "config that is no JSON": Case(
        _directory(_cut_config), "JSON"
    ),
    "config of another architecture": Case(
        _config(model_type="mamba"), "must be one of llama, qwen2"
    ),
    "config of other sizes": Case(
        _config(hidden_size=128), "must have shape", loads_weights=True
    ),
    "tokenizer that is missing": Case(
        _directory(lambda folder: (folder / "tokenizer.json").unlink()), "tokenizer.json"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """How the executor ended for each case."""
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for index, (name, case) in enumerate(CASES.items()):
        folder = root / str(index)
        folder.mkdir()
        paths[name] = case.make(folder)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([str(path) for path in paths.values()]),
        cwd=root, capture_output=True, text=True, timeout=110, check=False,
        env={"ISOBATCH_CACHE": str(root / "cache"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    found: dict[str, Ending] = {}
    said: list[str] = []
    by_path = {str(path): name for name, path in paths.items()}
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith("RESULT "):
            path, code = json.loads(line.removeprefix("RESULT "))
            found[by_path[path]] = Ending(code, "LOADED" in said, "\n".join(said), Path(path))
            said.clear()
        else:
            said.append(line)
    return found


@pytest.mark.parametrize("name", CASES)
def test_b44_a_damaged_model_is_refused_by_name(results: dict[str, Ending], name: str) -> None:
    ending = results[name]
    assert ending.code == 78, ending.said
    assert CASES[name].says in ending.said
    assert ending.path.name in ending.said
    assert "Traceback" not in ending.said
    assert ending.has_loaded is CASES[name].loads_weights
