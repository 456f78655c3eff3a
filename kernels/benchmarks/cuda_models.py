"""Models of Qwen2.5's shapes with random weights, as Programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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

GROUP_SIZE: Final = 64
BITS: Final = 4
EPSILON: Final = 1e-6
ROPE_BASE: Final = 1_000_000.0
Vector = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    context: int = 32768

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(K, N) of the merged matrices of a layer, and of the head."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (self.hidden, qkv),
            "o": (self.hidden, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
            "head": (self.hidden, self.vocabulary),
        }


QWEN_7B: Final = ModelShape("7B", 3584, 18944, 28, 28, 4, 152064, tied=False)
QWEN_05B: Final = ModelShape("0.5B", 896, 4864, 24, 14, 2, 151936, tied=True)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    qkv: tuple[QuantizedWeight, ...]
    qkv_bias: Vector
    o: QuantizedWeight
    gate_up: tuple[QuantizedWeight, ...]
    down: QuantizedWeight
    norms: tuple[Vector, Vector]  # before attention, and before the MLP


def program_of(
    shape: ModelShape,
    embedding: QuantizedWeight,
    head: QuantizedWeight,
    last_norm: Vector,
    layer: Callable[[int], LayerWeights],
) -> Program:
    """The Program of a model with these weights."""
    width = shape.heads * shape.head_dim
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    ops: list[Op] = [Embed(embedding, "x")]
    for index in range(shape.layers):
        weights = layer(index)
        ops += [
            NormQuantize("x", weights.norms[0], EPSILON, "a"),
            Linear("a", weights.qkv, "qkv", bias=weights.qkv_bias),
            RopeWriteKV("qkv", index),
            PagedAttention("qkv", index, "attention"),
            Quantize("attention", "o_in"),
            Linear("o_in", (weights.o,), "x", residual="x"),
            NormQuantize("x", weights.norms[1], EPSILON, "a"),
            Linear("a", weights.gate_up, "gate_up"),
            GateQuantize("gate_up", "inner"),
            Linear("inner", (weights.down,), "x", residual="x"),
        ]
    ops += [
        NormQuantize("x", last_norm, EPSILON, "last", wanted_only=True),
        Linear("last", (head,), "logits", wanted_only=True),
        RowStatistics("logits"),
    ]
    buffers = (
        Buffer("x", shape.hidden),
        Buffer("a", shape.hidden, GROUP_SIZE),
        Buffer("qkv", qkv),
        Buffer("attention", width),
        Buffer("o_in", width, GROUP_SIZE),
        Buffer("gate_up", 2 * shape.inner),
        Buffer("inner", shape.inner, GROUP_SIZE),
        Buffer("last", shape.hidden, GROUP_SIZE),
        Buffer("logits", shape.vocabulary),
    )
    dimensions = Dimensions(
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        context_length=shape.context,
        attention_scale=shape.head_dim**-0.5,
    )
    rope = RopeSpec(ROPE_BASE, shape.head_dim, interleaved=False)
    return Program(dimensions, rope, buffers, tuple(ops))


def random_weight(rng: np.random.Generator, outputs: int, inputs: int) -> QuantizedWeight:
    """4 bits in groups of 64, of a size that keeps activations near 1."""
    packed = rng.integers(0, 2**32, (outputs, inputs // 8), dtype=np.uint32)
    scales = rng.uniform(0.5, 1.5, (outputs, inputs // GROUP_SIZE)) * 0.2 / np.sqrt(inputs)
    biases = scales * -7.5
    return QuantizedWeight(
        packed, scales.astype(np.float16), biases.astype(np.float16), BITS, GROUP_SIZE
    )


def random_program(shape: ModelShape, seed: int = 0) -> Program:
    """A model whose layers have equal weights, each in memory of its own once they are packed."""
    rng = np.random.default_rng(seed)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    first = [
        random_weight(rng, outputs, inputs)
        for outputs, inputs in (
            (qkv, shape.hidden),
            (shape.hidden, shape.hidden),
            (2 * shape.inner, shape.hidden),
            (shape.hidden, shape.inner),
        )
    ]
    bias = rng.standard_normal(qkv).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32)

    def layer(_: int) -> LayerWeights:
        own = [QuantizedWeight(w.packed, w.scales, w.biases, w.bits, w.group_size) for w in first]
        return LayerWeights((own[0],), bias, own[1], (own[2],), own[3], (norm, norm))

    embedding = random_weight(rng, shape.vocabulary, shape.hidden)
    head = embedding if shape.tied else random_weight(rng, shape.vocabulary, shape.hidden)
    return program_of(shape, embedding, head, norm, layer)
