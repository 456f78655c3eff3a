"""Compiles Metal text with clang into a shared object, cached by content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.mlx_text import prepare_headers
from tests.metal_on_cpu.harness.rewrite import rewrite
from tests.metal_on_cpu.harness.signature import Signature

HERE = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("ISOBATCH_METAL_CACHE", HERE.parents[1] / ".cache" / "metal_on_cpu"))
MLX_VERSION = version("mlx")
_COMPILERS = ("clang++-19", "clang++-20", "clang++-18", "clang++")
_FLAGS = [
    *(
        "-std=c++20",
        "-fPIC",
        "-g1",
        "-O2",
        "-march=x86-64-v3",
        "-fno-math-errno",
        "-fno-trapping-math",
    ),
    # Metal's literals without suffix are float, and half and bfloat round after every operation.
    *("-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *(
        "-Wall",
        "-Wdouble-promotion",
        "-Wno-unknown-attributes",
        "-Wno-ignored-attributes",
        "-Wno-unused",
    ),
    *("-Wno-missing-braces", "-Wno-sign-compare", "-Wno-duplicate-decl-specifier", "-Wno-psabi"),
    *("-Wno-pass-failed", "-Wno-unneeded-internal-declaration", "-fno-caret-diagnostics"),
    *("-Wno-deprecated-anon-enum-enum-conversion", "-Wno-unknown-pragmas"),
]
# Headers are judged by content, through the name of the result, and not by the time of a checkout.
_PRECOMPILE = ("-Xclang", "-fno-pch-timestamp", "-x", "c++-header")
_CHECK = [
    *("-O1", "-DEMU_CHECK=1", "-fsanitize=thread", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-atomics=0"),
]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How one kernel is compiled."""

    contract: str = "off"  # or "fast", which still honours pragmas, as Apple's compiler does
    check: bool = False  # instrumented for races and bounds
    strict: bool = True  # implicit conversions to half or bfloat are errors

    def flags(self) -> list[str]:
        """Compiler flags, the same for the preamble and the kernel."""
        if self.contract not in ("off", "fast"):
            raise MetalError(f"[compiler] contract must be off or fast, got {self.contract}")
        contract = "fast-honor-pragmas" if self.contract == "fast" else "off"
        return [*_FLAGS, f"-ffp-contract={contract}", *(_CHECK if self.check else [])]


@functools.cache
def find_compiler() -> str | None:
    """Path of a usable clang++, or None."""
    wanted = os.environ.get("ISOBATCH_METAL_CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    return None


def _clang(*arguments: str) -> str:
    compiler = find_compiler()
    if compiler is None:
        raise MetalError("[compiler] no clang++ was found; on Debian: apt-get install clang-19")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MetalError(f"[compiler] clang refused the text:\n{done.stderr[:6000]}")
    return done.stderr


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@functools.cache
def _source_digest() -> str:
    files = sorted(
        p for folder in ("shim", "runtime") for p in (HERE / folder).rglob("*") if p.is_file()
    )
    return _digest(MLX_VERSION, str(find_compiler()), *(p.read_text() for p in files))


def _publish(build: Any, target: Path) -> Path:
    """Builds into a temporary name and renames, so that parallel runs never see half a file."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
        os.close(handle)
        try:
            build(name)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    return target


@functools.cache
def prepared_headers() -> Path:
    """MLX's Metal headers, rewritten for the shim, in the cache."""
    makers = [(HERE / "harness" / name).read_text() for name in ("mlx_text.py", "rewrite.py")]
    target = CACHE / f"mlx-{_digest(MLX_VERSION, *makers)}"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=CACHE))
        prepare_headers(building)
        try:
            building.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(building)
    return target


def _includes() -> list[str]:
    return [f"-I{HERE / 'shim'}", f"-I{prepared_headers()}"]


@functools.cache
def _preamble(options: CompileOptions) -> Path:
    """The shim and MLX's utils.h, precompiled."""
    text = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
    source = CACHE / f"preamble-{_digest(text)}.h"
    _publish(lambda name: Path(name).write_text(text), source)
    flags = options.flags()
    parts = (text, _source_digest(), str(prepared_headers()), *flags, *_PRECOMPILE)
    target = CACHE / f"preamble-{_digest(*parts)}.pch"
    return _publish(
        lambda name: _clang(*flags, *_includes(), *_PRECOMPILE, str(source), "-o", name),
        target,
    )


@functools.cache
def runtime() -> ctypes.CDLL:
    """The fiber runtime, loaded so that kernels find its symbols."""
    sources = [str(HERE / "runtime" / f"{name}.cpp") for name in ("fibers", "memory", "checker")]
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"]
    target = CACHE / f"runtime-{_digest(_source_digest(), *flags)}.so"
    path = _publish(lambda name: _clang(*flags, *sources, "-o", name), target)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emu_buffer_add.restype = ctypes.c_void_p
    library.emu_buffer_add.argtypes = [
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_char_p,
    ]
    library.emu_unwritten.restype = ctypes.c_long
    return library


def build_kernel(text: str, signature: Signature, options: CompileOptions) -> Path:
    """Shared object of the kernel in `text`, from the cache or built."""
    table = ", ".join(f"{{{str(p.is_buffer).lower()}, {p.index}}}" for p in signature.parameters)
    unit = (
        f"{rewrite(text)}\nstatic constexpr emu_parameter emu_parameters[] = {{{table}}};\n"
        f'extern "C" void emu_entry(void* const* buffers) {{'
        f" emu_call(&{signature.instance}, emu_parameters, buffers); }}\n"
    )
    strict = [
        *("-Werror=implicit-float-conversion", "-Wno-implicit-int-float-conversion"),
        "-Werror=pre-c++17-compat",  # MSL 3.1 is C++14
    ]
    flags = [*options.flags(), *(strict if options.strict else [])]
    preamble = _preamble(CompileOptions(contract=options.contract, check=options.check))
    target = CACHE / f"kernel-{_digest(unit, str(preamble), *flags)}.so"

    def build(name: str) -> None:
        source, program = Path(name + ".cpp"), Path(name + ".o")
        source.write_text(unit)
        try:
            notes = _clang(
                *flags,
                *_includes(),
                "-include-pch",
                str(preamble),
                "-c",
                str(source),
                "-o",
                str(program),
            )
            if "warning:" in notes and options.strict:
                raise MetalError(f"[compiler] warnings are errors here:\n{notes[:4000]}")
            # Linked without the sanitizer's own runtime: its calls land in runtime/checker.cpp.
            _clang("-shared", str(program), "-o", name, "-lm")
        finally:
            source.unlink(missing_ok=True)
            program.unlink(missing_ok=True)

    return _publish(build, target)


def load_kernel(program: Path) -> Any:
    """Entry point of a built kernel, for the launcher."""
    runtime()
    return ctypes.CDLL(str(program)).emu_entry
