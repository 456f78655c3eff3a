"""MLX's own text of a custom kernel, and MLX's own Metal headers, as installed."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.rewrite import rewrite

KERNELS = "mlx/backend/metal/kernels"
_DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, "bool_" if name == "bool" else name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "bfloat16"),
    )
}
# The header overloads constructors on the address space, which C++ cannot say; kernels here use
# complex numbers only as a type that has to exist.
_COMPLEX = """#pragma once
#include "mlx/backend/metal/kernels/bf16.h"
template <typename T> struct complex_t {
  using value_type = T;
  T real, imag;
  constexpr complex_t(T r = 0, T i = 0) : real(r), imag(i) {}
  complex_t operator+(complex_t b) const { return {real + b.real, imag + b.imag}; }
  complex_t operator*(complex_t b) const {
    return {real * b.real - imag * b.imag, real * b.imag + imag * b.real};
  }
};
template <typename T> static constexpr bool is_complex_v = false;
template <typename T> static constexpr bool is_complex_v<complex_t<T>> = true;
using complex64_t = complex_t<float>;
"""


def to_mlx_dtype(dtype: Any) -> mx.Dtype:
    """MLX's dtype for a numpy one; one of MLX's stays."""
    return dtype if isinstance(dtype, mx.Dtype) else _DTYPES[np.dtype(dtype).name]


def _captured_stdout(action: Any) -> str:
    """What native code printed during `action`."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            action()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode()


def generated_text(
    kernel: Any,
    *,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]] | None,
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[Any],
) -> str:
    """The text that MLX would hand to Apple's compiler, less its preamble (utils.h).

    `kernel` is what `mx.fast.metal_kernel` returned. The call is traced for export, which needs no
    GPU, and MLX prints the text.
    """
    typed = [(n, v if isinstance(v, bool | int) else to_mlx_dtype(v)) for n, v in template or []]

    def call(*inputs: mx.array) -> Any:
        return kernel(
            inputs=list(inputs),
            template=typed or None,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=list(output_shapes),
            output_dtypes=[to_mlx_dtype(d) for d in output_dtypes],
            verbose=True,
            stream=mx.gpu,
        )

    inputs = [mx.zeros(shape, to_mlx_dtype(d)) for shape, d in zip(shapes, dtypes, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        printed = _captured_stdout(
            lambda: mx.export_function(str(Path(folder, "kernel.mlxfn")), call, *inputs)
        )
    match = re.search(r"```\n(.*)\n```", printed, re.DOTALL)
    if match is None:
        raise MetalError(f"[mlx_text] MLX printed no source, got {printed[:200]!r}")
    return match.group(1)


def prepare_headers(target: Path) -> None:
    """Writes MLX's Metal headers of the installed wheel to `target`, rewritten for the shim."""
    source = Path(str(mx.__file__)).parent / "include"
    for path in sorted((source / KERNELS).rglob("*.h")):
        text = _COMPLEX if path.name == "complex.h" else path.read_text()
        if path.name == "type_traits.h":
            text = re.sub(  # specialisations that differ in the address space alone
                r"template <typename T>\s*struct pointer_element<(device|constant|threadgroup) T\*>"
                r" \{.*?\};\n",
                "",
                text,
                flags=re.DOTALL,
            )
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text if "nax" in path.name else rewrite(text))
