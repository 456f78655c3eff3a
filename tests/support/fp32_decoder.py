"""A decoder written again from the papers: dense fp32 arrays, whole sequences, no cache, no blocks.

It shares nothing with the executor but the shapes, and so checks data flow, layouts and pairings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tests.support.tiny_model import TinyShape

Float32 = npt.NDArray[np.float32]


def logits(
    shape: TinyShape,
    weights: Mapping[str, Float32],
    tokens: Sequence[int],
    frequency_factors: Sequence[float] | None = None,
    position_scale: float = 1.0,
    window: int = 0,
) -> Float32:
    """Returns (len(tokens), vocab_size) logits; weights have Hugging Face names."""
    x = weights["model.embed_tokens.weight"][list(tokens)]
    angles = _angles(shape, len(tokens), frequency_factors, position_scale)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"

        def linear(x: Float32, name: str, prefix: str = prefix) -> Float32:
            y = x @ weights[f"{prefix}.{name}.weight"].T
            bias = weights.get(f"{prefix}.{name}.bias")
            return y if bias is None else y + bias

        h = _norm(shape, x, weights[f"{prefix}.input_layernorm.weight"])
        q, k, v = (_heads(shape, linear(h, f"self_attn.{name}_proj")) for name in "qkv")
        q, k = _rotate(q, angles), _rotate(k, angles)
        x = x + linear(_attention(shape, q, k, v, window), "self_attn.o_proj")
        h = _norm(shape, x, weights[f"{prefix}.post_attention_layernorm.weight"])
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    x = _norm(shape, x, weights["model.norm.weight"])
    head = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return np.asarray(x @ head.T, np.float32)


def _norm(shape: TinyShape, x: Float32, weight: Float32) -> Float32:
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(shape.norm_epsilon))
    return np.asarray(x * scale * weight, np.float32)


def _heads(shape: TinyShape, x: Float32) -> Float32:
    return x.reshape(len(x), -1, shape.head_dim).swapaxes(0, 1)


def _angles(
    shape: TinyShape, length: int, factors: Sequence[float] | None, scale: float
) -> npt.NDArray[np.float64]:
    index = np.arange(shape.head_dim // 2)
    frequency = shape.rope_theta ** (-2.0 * index / shape.head_dim)
    if factors is not None:
        frequency = frequency / np.asarray(factors)
    return np.asarray(np.outer(np.arange(length) * scale, frequency))


def _rotate(x: Float32, angles: npt.NDArray[np.float64]) -> Float32:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = [first * cos - second * sin, first * sin + second * cos]
    return np.concatenate(rotated, axis=-1).astype(np.float32)


def _attention(shape: TinyShape, q: Float32, k: Float32, v: Float32, window: int) -> Float32:
    group = shape.num_heads // shape.num_kv_heads
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(shape.head_dim)
    length = q.shape[1]
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    hidden = (distance < 0) | ((distance >= window) if window else False)
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.asarray((p @ v).swapaxes(0, 1).reshape(length, -1), np.float32)
