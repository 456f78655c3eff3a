"""Gets llama.cpp out of llama-cpp-python's source and builds it, in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = ROOT / ".venv-bench"
PROGRAMS: Final = ("llama-server", "llama-bench", "llama-batched-bench")
# GCC 12 drops the stores before this call (SIGILL on machines with AMX); they must be seen.
_TILE_CONFIG: Final = "    _tile_loadconfig(&tc);\n"
_BARRIER: Final = '    __asm__ volatile("" ::: "memory");\n'
# The CPU alone, with all that this processor has; nothing that is not measured.
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_CCACHE=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Llama:
    """Built programs of llama.cpp."""

    folder: Path
    matmuls: Path  # ggml_matmuls.cpp, linked with its libraries
    version: str

    def program(self, name: str) -> str:
        """Path of one of PROGRAMS."""
        return str(self.folder / name)


def _run(*command: str, cwd: Path | None = None) -> None:
    print("+", " ".join(command[:8]), "..." if len(command) > 8 else "", flush=True)
    # Without a ceiling llama.cpp would take this repository's commit for its own.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(FOLDER.parent)}
    subprocess.run(command, check=True, cwd=cwd, env=environ)


def environment() -> Path:
    """Makes .venv-bench, with the build tools that isobatch is pinned to; returns its bin."""
    programs = FOLDER / "bin"
    if not (programs / "cmake").exists():
        _run(sys.executable, "-m", "venv", str(FOLDER))
        pip = (str(programs / "python"), "-m", "pip", "install", "-q", "--require-hashes")
        _run(*pip, "-r", str(ROOT / "requirements/build.txt"))
    return programs


def mlx_lm() -> Path:
    """Installs mlx-lm into .venv-bench; returns that environment's Python."""
    python = environment() / "python"
    pins = ROOT / "requirements/bench-mlx.txt"
    _run(str(python), "-m", "pip", "install", "-q", "-r", str(pins))
    return python


def _source(programs: Path) -> Path:
    """Downloads and unpacks the source; returns llama.cpp's folder in it."""
    archives = FOLDER / "archives"
    if not list(archives.glob("llama_cpp_python-*.tar.gz")):
        pip = (str(programs / "python"), "-m", "pip", "download", "-q", "--no-deps")
        _run(
            *pip, "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
            "--dest", str(archives), "-r", str(ROOT / "requirements/bench.txt"),
        )  # fmt: skip
    archive = next(archives.glob("llama_cpp_python-*.tar.gz"))
    target = FOLDER / "source"
    source = target / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    if not source.exists():
        with tarfile.open(archive) as files:
            files.extractall(target, filter="data")
    return source


def has_amx() -> bool:
    """Whether this processor has AMX tiles."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " amx_tile" in cpuinfo.read_text()


def with_barrier(text: str) -> str:
    """Source of the AMX matmul with a compiler barrier before the tile configuration is loaded."""
    if _BARRIER + _TILE_CONFIG in text:
        return text
    if text.count(_TILE_CONFIG) != 1:
        raise ValueError("[bench] llama.cpp loads its tile configuration in another way now")
    return text.replace(_TILE_CONFIG, _BARRIER + _TILE_CONFIG)


def build() -> Path:
    """Builds what is not built yet; returns the folder of the programs."""
    programs = environment()
    built = FOLDER / "build/bin"
    if all((built / name).exists() for name in PROGRAMS):
        return built
    source = _source(programs)
    if has_amx():
        path = source / "ggml/src/ggml-cpu/amx/mmq.cpp"
        path.write_text(with_barrier(path.read_text()))
    low = ("nice", "-n", "19", str(programs / "cmake"))
    ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
    folders = ("-S", str(source), "-B", str(built.parent))
    _run(*low, *folders, "-G", "Ninja", ninja, *_OPTIONS)
    jobs = ("--parallel", str(os.cpu_count() or 1))
    _run(*low, "--build", str(built.parent), *jobs, "--target", *PROGRAMS)
    return built


def ggml_matmuls(built: Path) -> Path:
    """Compiles the benchmark of ggml's products beside llama.cpp's programs; returns its path."""
    target, text = built / "ggml-matmuls", Path(__file__).with_name("ggml_matmuls.cpp")
    if target.exists() and target.stat().st_mtime > text.stat().st_mtime:
        return target
    cache = (built.parent / "CMakeCache.txt").read_text()
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)
    if found is None:
        raise ValueError(f"[bench] {built.parent} must be a build folder of llama.cpp")
    libraries = built.parent / "ggml/src"
    _run(
        "c++", "-O2", "-std=c++17", "-fopenmp", f"-I{found[1]}/ggml/include", str(text),
        *(str(libraries / f"lib{name}.a") for name in ("ggml", "ggml-cpu", "ggml-base")),
        "-lpthread", "-ldl", "-lm", "-o", str(target),
    )  # fmt: skip
    return target


def llama(folder: Path | None) -> Llama:
    """The programs in `folder`, or ours built now when it is None."""
    found = folder or build()
    said = subprocess.run(
        [found / "llama-server", "--version"], capture_output=True, text=True, check=True
    )
    lines = (said.stdout + said.stderr).splitlines()
    version = "; ".join(line.strip() for line in lines if line.startswith(("version", "built")))
    return Llama(found, ggml_matmuls(found), version)
