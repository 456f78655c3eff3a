"""The start-up check: does a unit give the reference's bits on this very machine?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from isobatch_kernels import _cpu
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.program import (
    Buffer,
    Dimensions,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Op,
    PagedAttention,
    Program,
    Quantize,
    QuantizedWeight,
    RopeSpec,
    RopeWriteKV,
    RowStatistics,
)
from isobatch_kernels.step import Backend, Float32, Stat, StepInput

_ROWS = (1, 2, 3, 5, 8, 9, 17)
_OUTPUTS = (1, 8, 31, 33, 50)
# bits, group size, activation block
_FORMATS = (
    (4, 32, 32),
    (4, 64, 64),
    (4, 128, 64),
    (4, 16, 32),
    (8, 32, 32),
    (8, 64, 64),
    (8, 16, 32),
    (2, 64, 32),
    (3, 32, 32),
    (5, 32, 32),
    (6, 64, 64),
)
# Comparisons of one unit: every format at every height, and a whole program.
NUM_CASES = len(_FORMATS) * len(_OUTPUTS) + 1


def random_weight(
    rng: np.random.Generator, outputs: int, inputs: int, bits: int, group_size: int, *, half: bool
) -> QuantizedWeight:
    """A weight with extreme integers, scales of both signs and some below the floor."""
    packed = rng.integers(0, 2**32, (outputs, inputs * bits // 32), dtype=np.uint32)
    packed[::5] = 0xFFFFFFFF
    shape = (outputs, inputs // group_size)
    scales = rng.uniform(-0.02, 0.02, shape)
    scales[rng.random(shape) < 0.05] = 3e-8
    biases = scales * -(2 ** (bits - 1)) + rng.uniform(-0.01, 0.01, shape)
    dtype = np.float16 if half else np.float32
    return QuantizedWeight(packed, scales.astype(dtype), biases.astype(dtype), bits, group_size)


def random_rows(rng: np.random.Generator, rows: int, width: int) -> Float32:
    """Activations with outliers, blocks near the floors, subnormals, and one row not finite."""
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 3000
    factors = np.array([1, 1, 1, 0, 2.0**-40, 2.0**-39, 1e-40, 2.0**90], dtype=np.float32)
    for start in range(0, width, 32):
        x[:, start : start + 32] *= rng.choice(factors, (rows, 1))
    if rows > 2:
        x[rows // 2, rng.integers(width)] = np.nan
        x[rows // 2, rng.integers(width)] = np.inf
    return x


def first_difference(unit: str, activation_bits: int = 12) -> str | None:
    """Runs a unit against the reference.

    Args:
        unit: a unit that this machine has.
        activation_bits: 12 or 8.

    Returns:
        None where every bit is equal, else where the first difference is.
    """
    rng = np.random.default_rng(1)
    for bits, group_size, block in _FORMATS:
        inputs = group_size * int(rng.integers(1, 6))
        for outputs in _OUTPUTS:
            half = bool(rng.integers(2))
            weight = random_weight(rng, outputs, inputs, bits, group_size, half=half)
            if not _layers_agree(rng, unit, weight, block, activation_bits):
                return f"linear, {bits} bits, groups of {group_size}, {inputs} to {outputs}"
    is_equal = programs_agree(
        rng,
        lambda program, limits: CpuBackend(program, limits, unit=unit),
        activation_bits=activation_bits,
    )
    return None if is_equal else "a whole program"


def _layers_agree(
    rng: np.random.Generator, unit: str, weight: QuantizedWeight, block: int, activation_bits: int
) -> bool:
    layers = [
        _cpu.LinearLayer.quantized(
            name,
            weight.packed,
            weight.scales,
            weight.biases,
            weight.bits,
            weight.group_size,
            block,
            activation_bits,
        )
        for name in (unit, "reference")
    ]
    x = random_rows(rng, max(_ROWS), weight.num_inputs)
    expected, finite = _forward(layers[1], x, weight.num_outputs)
    for rows in _ROWS:
        got, _ = _forward(layers[0], x[:rows], weight.num_outputs)
        if not _same_bits(got[finite[:rows]], expected[:rows][finite[:rows]]):
            return False
    return True


def _forward(
    layer: _cpu.LinearLayer, x: Float32, outputs: int
) -> tuple[Float32, npt.NDArray[np.bool_]]:
    y = np.empty((len(x), outputs), dtype=np.float32)
    finite = np.empty(len(x), dtype=np.bool_)
    layer.forward(x, y, finite)
    return y, finite


def _same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def programs_agree(
    rng: np.random.Generator,
    make: Callable[[Program, CpuLimits], Backend],
    *,
    activation_bits: int = 12,
) -> bool:
    """A two-layer model with odd sizes: a prefill of two rows, then one decode step.

    Args:
        rng: draws the model and its steps.
        make: makes the backend that is compared with the CPU's reference.
        activation_bits: of both.
    """
    program = replace(tiny_program(rng), activation_bits=activation_bits)
    limits = CpuLimits(40, 16, 4, 600, num_threads=1)
    backends = make(program, limits), CpuBackend(program, limits, unit="reference")
    for step in _steps(rng):
        got, expected = (backend.run(step) for backend in backends)
        for name in ("logits", "argmax_ids", "normalizers", "quantile_ids", "top_k_ids"):
            if not _same_bits(getattr(got, name), getattr(expected, name)):
                return False
    return all(
        _same_bits(backends[0].read_block(i), backends[1].read_block(i))
        for i in range(limits.num_blocks)
    )


def tiny_program(rng: np.random.Generator) -> Program:
    """Two layers of width 96 with 4 query heads on 2 key/value heads of 24 dimensions."""
    hidden, heads, kv_heads, head_dim, inner, vocab = 96, 4, 2, 24, 160, 1100

    def weight(outputs: int, inputs: int, bits: int = 4) -> QuantizedWeight:
        return random_weight(rng, outputs, inputs, bits, 32, half=True)

    def norm() -> Float32:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    embedding = weight(vocab, hidden, 8)
    ops: list[Op] = [Embed(embedding, "x")]
    for layer in range(2):
        qkv = (heads + 2 * kv_heads) * head_dim
        ops += [
            NormQuantize("x", norm(), 1e-5, "a"),
            Linear("a", (weight(qkv, hidden),), "qkv"),
            RopeWriteKV("qkv", layer),
            PagedAttention("qkv", layer, "attention", window=0 if layer else 40),
            Quantize("attention", "a"),
            Linear("a", (weight(hidden, heads * head_dim),), "x", residual="x"),
            NormQuantize("x", norm(), 1e-5, "a"),
            Linear("a", (weight(2 * inner, hidden),), "gate_up"),
            GateQuantize("gate_up", "inner"),
            Linear("inner", (weight(hidden, inner),), "x", residual="x"),
        ]
    ops += [
        NormQuantize("x", norm(), 1e-5, "last", wanted_only=True),
        Linear("last", (embedding,), "logits", wanted_only=True),
        RowStatistics("logits"),
    ]
    buffers = (
        Buffer("x", hidden),
        Buffer("a", hidden, 32),
        Buffer("qkv", (heads + 2 * kv_heads) * head_dim),
        Buffer("attention", heads * head_dim),
        Buffer("gate_up", 2 * inner),
        Buffer("inner", inner, 32),
        Buffer("last", hidden, 32),
        Buffer("logits", vocab),
    )
    dims = Dimensions(hidden, 2, heads, kv_heads, head_dim, vocab, 640, head_dim**-0.5)
    return Program(dims, RopeSpec(10000.0, head_dim, interleaved=False), buffers, tuple(ops))


def _steps(rng: np.random.Generator) -> Iterator[StepInput]:
    table = np.full((2, 40), -1, dtype=np.int32)
    table[0, :18] = rng.permutation(18)
    table[1, :20] = 18 + rng.permutation(20)
    yield _step(rng, table, starts=(0, 0), lengths=(275, 7))
    yield _step(rng, table, starts=(275, 7), lengths=(1, 1))


def _step(
    rng: np.random.Generator,
    table: npt.NDArray[np.int32],
    starts: tuple[int, int],
    lengths: tuple[int, int],
) -> StepInput:
    tokens = sum(lengths)
    wanted = np.cumsum(lengths, dtype=np.int32) - 1
    return StepInput(
        token_ids=rng.integers(0, 1100, tokens, dtype=np.int32),
        positions=np.concatenate(
            [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]
        ),
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        block_tables=table,
        wanted=wanted.astype(np.int32),
        statistics=np.full(2, Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE, dtype=np.uint32),
        top_k=np.array([5, 64], dtype=np.int32),
        inverse_temperatures=np.array([1.0, 1.25], dtype=np.float32),
        quantiles=np.array([0.25, 0.75], dtype=np.float32),
        edit_starts=np.array([0, 1, 1], dtype=np.int32),
        edit_ids=np.array([3], dtype=np.int32),
        edit_values=np.array([-2.5], dtype=np.float32),
    )
