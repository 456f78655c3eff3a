"""Stands in for `mx.fast.cuda_kernel`: compiles a kernel's own text with clang and runs it here."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

COMPILER = next((name for name in map(shutil.which, ("clang++-19", "clang++")) if name), None)
_HERE = Path(__file__).parent
_TYPES = {
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}


def _plain(text: str) -> str:
    """Kernel text without what is CUDA's alone: assembly, and words for where memory lies."""
    text = re.sub(r"^#(include <cuda|undef __global__|define __global__).*$", "", text, flags=re.M)
    text = re.sub(
        r"^__device__ __forceinline__ void mma16816\([^{]*\{.*?^\}", "", text, flags=re.M | re.S
    )
    lines = []
    for line in text.splitlines():
        if "cp.async.cg" in line:
            line = "std::memcpy(to, from, 16);"
        elif "cp.async.commit" in line:
            line = "__device__ __forceinline__ void x1_commit() {}"
        elif "cp.async.wait" in line or line.startswith(
            ("const unsigned address", "extern __shared__")
        ):
            line = ""
        lines.append(re.sub(r"^__shared__ (__align__\(16\) )?", "alignas(16) static ", line))
    return "\n".join(lines)


@functools.cache
def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    stem = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(source, encoding="utf-8")
    library = stem.with_suffix(".so")
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-pthread"]
    command = [COMPILER, *options, f"-I{_HERE}", "-o", str(library), str(stem.with_suffix(".cpp"))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:3000]
    return ctypes.CDLL(str(library))


def _view(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's own memory, so that writes in place arrive."""
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)


class EmulatedKernel:
    """One kernel, called as MLX's are."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """Takes the keywords of `mx.fast.cuda_kernel`."""
        self._folder = folder
        self._inputs: list[str] = options["input_names"]
        self._outputs: list[str] = options["output_names"]
        self._header = self._read(options["header"])
        self._body = self._read(options["source"])

    @staticmethod
    def _read(text: str) -> str:
        """The text behind an #include of a file."""
        found = re.search(r'#include "(.*)"', text)
        return Path(found.group(1)).read_text(encoding="utf-8") if found else text

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, int]] | None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Runs every block; outputs are filled with bytes of ones first."""
        source = self._source(inputs, template or [], output_dtypes)
        library = _compiled(source, self._folder)
        views = [_view(array) for array in inputs]
        outputs = []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            outputs.append(np.full((int(np.prod(shape)), dtype.size), 0xFF, np.uint8))
        pointers = [view.ctypes.data for view in (*views, *outputs)]
        shapes = np.zeros((len(views), 8), np.int32)
        strides = np.zeros((len(views), 8), np.int64)
        for i, view in enumerate(views):
            shapes[i, : view.ndim] = view.shape
            strides[i, : view.ndim] = [step // view.itemsize for step in view.strides]
        threads = threadgroup[0]
        blocks = (ctypes.c_int * 3)(-(-grid[0] // threads), grid[1], grid[2])
        library.launch(
            blocks,
            threads,
            (ctypes.c_void_p * len(pointers))(*pointers),
            shapes.ctypes.data_as(ctypes.c_void_p),
            strides.ctypes.data_as(ctypes.c_void_p),
        )
        words = {2: np.uint16, 4: np.uint32}
        return [
            mx.array(raw.view(words[dtype.size]).reshape(shape)).view(dtype)
            for raw, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _source(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> str:
        parameters, arguments = [], []
        names = [*self._inputs, *self._outputs]
        types = [*(array.dtype for array in inputs), *output_dtypes]
        for i, (name, dtype) in enumerate(zip(names, types, strict=True)):
            kind = ("const " if i < len(inputs) else "") + _TYPES[dtype]
            parameters.append(f"{kind}* {name}")
            arguments.append(f"({kind}*)buffers[{i}]")
            for suffix, sizes in (("shape", "Shape"), ("strides", "Strides")):
                if i < len(inputs) and f"{name}_{suffix}" in self._body:
                    parameters.append(f"const {sizes} {name}_{suffix}")
                    arguments.append(f"{suffix}[{i}]")
        constants = "".join(f"constexpr int {name} = {value};\n" for name, value in template)
        return (
            '#include "cuda_shim.h"\n'
            f"{_plain(self._header)}\nvoid kernel({', '.join(parameters)}) {{\n"
            f"{constants}{_plain(self._body)}\n}}\n"
            "static void** buffers; static const Shape* shape; static const Strides* strides;\n"
            f"static void call() {{ kernel({', '.join(arguments)}); }}\n"
            'extern "C" void launch(const int* blocks, int threads, void** b,\n'
            "    const Shape* s, const Strides* t) {\n"
            "  buffers = b; shape = s; strides = t;\n"
            "  run_blocks(blocks, threads, call);\n}\n"
        )
