"""Models of Qwen2.5's shapes with random weights, for mlx-lm and as a Program on them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

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


def peer_model(shape: ModelShape, seed: int = 0) -> Any:
    """mlx-lm's Qwen2 with random weights, 4 bits in groups of 64, fp16."""
    qwen2 = importlib.import_module("mlx_lm.models.qwen2")
    quantize: Any = nn.quantize  # type: ignore[attr-defined]
    mx.random.seed(seed)
    arguments = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        rms_norm_eps=EPSILON,
        vocab_size=shape.vocabulary,
        num_key_value_heads=shape.kv_heads,
        rope_theta=ROPE_BASE,
        tie_word_embeddings=shape.tied,
    )
    model = qwen2.Model(arguments)
    model.set_dtype(mx.float16)
    quantize(model, group_size=GROUP_SIZE, bits=BITS)
    mx.eval(model.parameters())
    return model


def _weight(layer: Any, *, on_host: bool) -> QuantizedWeight:
    packed, scales, biases = layer.weight, layer.scales, layer.biases
    if on_host:
        packed, scales, biases = np.array(packed), np.array(scales), np.array(biases)
    return QuantizedWeight(packed, scales, biases, bits=BITS, group_size=GROUP_SIZE)


def _vector(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


def program_of(model: Any, shape: ModelShape, *, on_host: bool = False) -> Program:
    """The Program of a peer model; `on_host` copies the weights to numpy for other backends."""
    width = shape.heads * shape.head_dim
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    inner = model.model
    embedding = _weight(inner.embed_tokens, on_host=on_host)
    head = embedding if shape.tied else _weight(model.lm_head, on_host=on_host)
    ops: list[Op] = [Embed(embedding, "x")]
    for index, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        ops += [
            NormQuantize("x", _vector(layer.input_layernorm.weight), EPSILON, "a"),
            Linear(
                "a",
                tuple(_weight(p, on_host=on_host) for p in projections),
                "qkv",
                bias=np.concatenate([_vector(p.bias) for p in projections]),
            ),
            RopeWriteKV("qkv", index),
            PagedAttention("qkv", index, "attention"),
            Quantize("attention", "o_in"),
            Linear("o_in", (_weight(attention.o_proj, on_host=on_host),), "x", residual="x"),
            NormQuantize("x", _vector(layer.post_attention_layernorm.weight), EPSILON, "a"),
            Linear(
                "a",
                tuple(_weight(p, on_host=on_host) for p in (mlp.gate_proj, mlp.up_proj)),
                "gate_up",
            ),
            GateQuantize("gate_up", "inner"),
            Linear("inner", (_weight(mlp.down_proj, on_host=on_host),), "x", residual="x"),
        ]
    ops += [
        NormQuantize("x", _vector(inner.norm.weight), EPSILON, "last", wanted_only=True),
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
