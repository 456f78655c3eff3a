"""Compiles kernels with NVRTC and keeps the machine code on disk."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import platformdirs

from isobatch_kernels.cuda.device import KernelKey
from isobatch_kernels.cuda.source import device_text, load_kernels

_CACHE_VARIABLE: Final = "ISOBATCH_CACHE"
_OPTIONS: Final = ("--std=c++17", "--fmad=false")


@functools.cache
def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


def _call(name: str, *arguments: Any) -> Any:
    error, *results = getattr(_nvrtc(), name)(*arguments)
    if error.value:
        raise RuntimeError(f"[cuda] {name} must succeed, got {error.name}")
    return results[0] if len(results) == 1 else results


def program_text(key: KernelKey) -> str:
    """All that the compiler gets."""
    return device_text() + load_kernels()[key.name].body(dict(key.constants))


def cache_folder() -> Path:
    """Where machine code is kept."""
    value = os.environ.get(_CACHE_VARIABLE, "")
    base = Path(value).expanduser() if value else platformdirs.user_cache_path("isobatch")
    return base / "cuda"


def compile_kernel(key: KernelKey, capability: int) -> bytes:
    """Machine code of a kernel for a compute capability (90 for 9.0).

    Raises:
        RuntimeError: NVRTC is not here or refuses the text.
    """
    return compile_text(key.name, program_text(key), capability)


def compile_text(name: str, text: str, capability: int) -> bytes:
    """As `compile_kernel`, for any text."""
    options = [*_OPTIONS, f"--gpu-architecture=sm_{capability}"]
    version = _call("nvrtcVersion")
    digest = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:32]}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    cubin = _compile(name, text, options)
    keep(path, cubin)
    return cubin


def _compile(name: str, text: str, options: list[str]) -> bytes:
    program = _call("nvrtcCreateProgram", text.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        encoded = [option.encode() for option in options]
        (error,) = _nvrtc().nvrtcCompileProgram(program, len(encoded), encoded)
        if error.value:
            log = b" " * _call("nvrtcGetProgramLogSize", program)
            _call("nvrtcGetProgramLog", program, log)
            raise RuntimeError(f"[cuda] kernel {name} must compile, got {log.decode()[:2000]}")
        cubin = b" " * _call("nvrtcGetCUBINSize", program)
        _call("nvrtcGetCUBIN", program, cubin)
        return bytes(cubin)
    finally:
        _call("nvrtcDestroyProgram", program)


def keep(path: Path, content: bytes) -> None:
    """Whole or not at all; a folder that cannot be written costs only time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
