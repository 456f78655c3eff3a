"""MLX's own Metal kernels, from the installed wheel, run under the emulation.

They work on real GPUs, so right answers and clean checks here say that the emulation's simdgroups,
barriers, matrices and layouts are those of the hardware. Answers are compared with fp64 at the
rounding of fp16; nothing of class X1 is in this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.metal_on_cpu.harness.compiler import (
    CompileOptions,
    build_kernel,
    load_kernel,
    prepared_headers,
)
from tests.metal_on_cpu.harness.launcher import Binding, LaunchOptions, launch
from tests.metal_on_cpu.harness.signature import parse_signature

FOLDER = "mlx/backend/metal/kernels"
Half = np.ndarray[Any, np.dtype[np.float16]]


class MlxKernel:
    """A kernel of one of MLX's headers, launched with buffers by parameter name."""

    def __init__(
        self, header: str, function: str, arguments: str, check: bool, constants: str = ""
    ) -> None:
        text = (prepared_headers() / FOLDER / header).read_text()
        self._signature = parse_signature(text, function, f"{function}<{arguments}>")
        includes = [
            f'#include "{FOLDER}/{name}"'
            for name in ("quantized_utils.h", "steel/gemm/gemm.h", header)
        ]
        unit = "\n".join([constants, *includes])
        options = CompileOptions(check=check, strict=False)
        self._entry = load_kernel(build_kernel(unit, self._signature, options))
        self._check = check

    def __call__(
        self,
        inputs: dict[str, Any],
        output: tuple[str, Half],
        groups: tuple[int, int, int],
        threads: tuple[int, int, int],
        order: int = 0,
    ) -> None:
        given = {name: np.atleast_1d(np.asarray(value)) for name, value in inputs.items()}
        absent = np.zeros(64, np.uint8)
        bindings = []
        for p in sorted(
            (p for p in self._signature.parameters if p.is_buffer), key=lambda p: p.index
        ):
            writable = p.name == output[0]
            array = output[1] if writable else given.get(p.name, absent)
            bindings.append(Binding(p.name, array, writable))
        grid = tuple(g * t for g, t in zip(groups, threads, strict=True))
        options = LaunchOptions(check=self._check, order=order)
        launch(self._entry, bindings, grid, threads, options)


def quantised(
    rng: np.random.Generator, n: int, k: int
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """4-bit weights in groups of 64, and their values."""
    q = rng.integers(0, 16, (n, k))
    packed = sum(q[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    scales, biases = rng.uniform(-0.1, 0.1, (2, n, k // 64)).astype(np.float16)
    wide = [np.repeat(part.astype(np.float64), 64, axis=1) for part in (scales, biases)]
    return {"w": packed, "scales": scales, "biases": biases}, q * wide[0] + wide[1]


def assert_close(got: Half, expected: np.ndarray[Any, Any]) -> None:
    """Within the rounding of fp16 over the whole result."""
    assert np.abs(got.astype(np.float64) - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("check", [False, True])
def test_matrix_by_vector(check: bool) -> None:
    """affine_qmv_fast: simd_sum, packed loads, two simdgroups of four outputs."""
    rng = np.random.default_rng(0)
    n, k = 24, 512
    weights, values = quantised(rng, n, k)
    x, y = rng.standard_normal(k).astype(np.float16), np.empty(n, np.float16)
    kernel = MlxKernel("quantized.h", "affine_qmv_fast", "half, 64, 4, false", check)
    sizes = {"in_vec_size": np.int32(k), "out_vec_size": np.int32(n)}
    for order in range(3):
        kernel({**weights, "x": x, **sizes}, ("y", y), (1, n // 8, 1), (32, 2, 1), order)
        assert_close(y, values @ x.astype(np.float64))


@pytest.mark.parametrize("check", [False, True])
def test_matrix_by_matrix(check: bool) -> None:
    """affine_qmm_t: threadgroup tiles, 8x8 matrices through thread_elements, ragged edges."""
    rng = np.random.default_rng(1)
    n, k, m = 40, 128, 19
    weights, values = quantised(rng, n, k)
    x, y = rng.standard_normal((m, k)).astype(np.float16), np.empty((m, n), np.float16)
    kernel = MlxKernel("quantized.h", "affine_qmm_t", "half, 64, 4, false, false", check)
    sizes = {"K": np.int32(k), "N": np.int32(n), "M": np.int32(m)}
    kernel({**weights, "x": x, **sizes}, ("y", y), (2, 1, 1), (32, 2, 2))
    assert_close(y, x.astype(np.float64) @ values.T)


@pytest.mark.parametrize("check", [False, True])
def test_attention_of_one_query(check: bool) -> None:
    """sdpa_vector: 32 simdgroups that meet in threadgroup memory, shared key/value heads."""
    rng = np.random.default_rng(2)
    heads, kv_heads, keys, d = 4, 2, 70, 64
    q = rng.standard_normal((heads, d)).astype(np.float16)
    k, v = rng.standard_normal((2, kv_heads, keys, d)).astype(np.float16)
    out = np.empty((heads, d), np.float16)
    kernel = MlxKernel("sdpa_vector.h", "sdpa_vector", "half, 64", check)
    sizes: dict[str, Any] = {
        "gqa_factor": np.int32(2),
        "N": np.int32(keys),
        "scale": np.float32(0.125),
    }
    for name in ("k", "v"):
        sizes |= {f"{name}_head_stride": np.uint64(keys * d), f"{name}_seq_stride": np.uint64(d)}
    kernel(
        {"queries": q, "keys": k, "values": v, **sizes}, ("out", out), (heads, 1, 1), (1024, 1, 1)
    )
    scores = np.einsum(
        "hd,hkd->hk", q.astype(np.float64) * 0.125, np.repeat(k, 2, axis=0).astype(np.float64)
    )
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    assert_close(out, np.einsum("hk,hkd->hd", weights, np.repeat(v, 2, axis=0).astype(np.float64)))
