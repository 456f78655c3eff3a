"""Llama decoders in plain torch, as functions over dictionaries of tensors with GGUF names.

Both the teacher and the student are read by it. Rows of q and k are in halves order
(`gguf_file.halves`), so that rotary embedding works on two contiguous parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from training.gguf_file import BLOCK, LEVELS, Float32, halves, interleaved

Tensor = Any  # torch.Tensor; torch is no dependency of the product and has no types here
Weights = Mapping[str, Tensor]

EMBED: Final = "token_embd.weight"
NORM: Final = "output_norm.weight"
_MERGED: Final = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_in": ("ffn_gate", "ffn_up")}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one decoder, with a tied embedding."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float = 1e-5
    rope_base: float = 100000.0
    context_length: int = 8192

    def metadata(self) -> dict[str, object]:
        """Return these sizes as GGUF metadata."""
        return {
            "llama.block_count": self.num_layers,
            "llama.context_length": self.context_length,
            "llama.embedding_length": self.hidden_size,
            "llama.feed_forward_length": self.intermediate_size,
            "llama.attention.head_count": self.num_heads,
            "llama.attention.head_count_kv": self.num_kv_heads,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "llama.rope.freq_base": self.rope_base,
            "llama.rope.dimension_count": self.head_dim,
            "llama.vocab_size": self.vocab_size,
        }


def shape_of(metadata: Mapping[str, object], vocab_size: int) -> Shape:
    """Read the sizes from a checked file's metadata."""

    def number(key: str) -> float:
        value = metadata[f"llama.{key}"]
        assert isinstance(value, int | float)
        return value

    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    return Shape(
        hidden_size=hidden,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv")),
        head_dim=int(number("rope.dimension_count")),
        vocab_size=vocab_size,
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
        rope_base=number("rope.freq_base"),
        context_length=int(number("context_length")),
    )


def from_file(tensors: Mapping[str, Float32], shape: Shape, dtype: Any, device: str) -> Weights:
    """Return a file's tensors on a device, q and k in halves order."""
    weights = {}
    for name, values in tensors.items():
        rotary = "attn_q." in name or "attn_k." in name
        array = halves(values, shape.head_dim) if rotary else values
        weights[name] = torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)
    return weights


def within_half(tensors: Mapping[str, Float32], shape: Shape) -> tuple[dict[str, Float32], Shape]:
    """Return the same function with a residual stream an eighth as large.

    SmolLM2's reaches 25,000 at some places, and fp16 ends at 65,504. Powers of two change nothing
    else: norms take the factor out again, and the last norm's weights give it back to the head.
    """
    factors = {EMBED: 0.125, NORM: 8.0, "attn_output.weight": 0.125, "ffn_up.weight": 0.125}

    def factor(name: str) -> np.float32:
        return np.float32(factors.get(name, factors.get(name.split(".", 2)[-1], 1.0)))

    scaled = {name: values * factor(name) for name, values in tensors.items()}
    return scaled, replace(shape, norm_epsilon=shape.norm_epsilon / 64)


def merged(weights: Weights, shape: Shape) -> dict[str, Tensor]:
    """Return weights with q, k and v as one matrix, and gate and up: fewer, larger products."""
    joined = dict(weights)
    for layer in range(shape.num_layers):
        for name, parts in _MERGED.items():
            names = [f"blk.{layer}.{part}.weight" for part in parts]
            joined[f"blk.{layer}.{name}.weight"] = torch.cat([joined.pop(each) for each in names])
    return joined


def to_file(weights: Weights, shape: Shape) -> dict[str, Float32]:
    """Undo `from_file`: fp32 arrays in a file's order of rows."""
    arrays = {}
    for name, tensor in weights.items():
        values = tensor.detach().float().cpu().numpy()
        rotary = "attn_q." in name or "attn_k." in name
        arrays[name] = interleaved(values, shape.head_dim) if rotary else values
    return arrays


def initial(shape: Shape, teacher_embedding: Tensor, seed: int) -> dict[str, Tensor]:
    """Return a student's first fp32 weights, on the teacher's device.

    Its embedding is the teacher's, projected on its own first right singular vectors: inner
    products between tokens, which a tied head lives on, are kept as well as this width allows.
    """
    device = teacher_embedding.device
    draws = torch.Generator().manual_seed(seed)
    wide = teacher_embedding.double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)  # ascending
    basis = vectors[:, -shape.hidden_size :].flip(1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=draws) * (gain / math.sqrt(columns))
        return values.to(device)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    depth = 1 / math.sqrt(2 * shape.num_layers)
    weights = {EMBED: (wide @ basis).float().contiguous()}
    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}"
        weights |= {
            f"{prefix}.attn_norm.weight": torch.ones(hidden, device=device),
            f"{prefix}.attn_q.weight": matrix(query, hidden),
            f"{prefix}.attn_k.weight": matrix(key, hidden),
            f"{prefix}.attn_v.weight": matrix(key, hidden),
            f"{prefix}.attn_output.weight": matrix(hidden, query, depth * 0.5),
            f"{prefix}.ffn_norm.weight": torch.ones(hidden, device=device),
            f"{prefix}.ffn_gate.weight": matrix(inner, hidden),
            f"{prefix}.ffn_up.weight": matrix(inner, hidden),
            f"{prefix}.ffn_down.weight": matrix(hidden, inner, depth * 0.5),
        }
    # Logits that begin small: a row of the embedding is longer than a head's row would be.
    length = float(weights[EMBED].norm(dim=1).square().mean().sqrt())
    return weights | {NORM: torch.full((hidden,), min(1.0, 0.5 / length), device=device)}


def round_weights(weights: Weights) -> dict[str, Tensor]:
    """Return weights whose matrices have the values that `gguf_file.write_gguf` stores.

    Gradients pass straight through the rounding.
    """
    return {
        name: values if values.ndim == 1 else values + (_rounded(values) - values).detach()
        for name, values in weights.items()
    }


def _rounded(values: Tensor) -> Tensor:
    rows = values.detach().float().reshape(-1, BLOCK)
    low = rows.amin(1)
    step = ((rows.amax(1) - low) / LEVELS).half().float()[:, None]
    least = low.half().float()[:, None]
    safe = torch.where(step > 0, step, torch.ones_like(step))
    q = torch.clamp(torch.round((rows - least) / safe), 0, LEVELS)
    return (step * q + least).reshape(values.shape)


def rope_table(shape: Shape, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (length, head_dim/2) fp32."""
    index = torch.arange(shape.head_dim // 2, dtype=torch.float64)
    angles = torch.outer(
        torch.arange(length, dtype=torch.float64),
        shape.rope_base ** (-2.0 * index / shape.head_dim),
    )
    return angles.cos().float().to(device), angles.sin().float().to(device)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over a whole sequence: q (B, H, T, D), k and v (B, KV, T, D)."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (
            x[:, :, None].expand(-1, -1, group, -1, -1).reshape(q.shape).contiguous()
            for x in (k, v)
        )
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Cache:
    """Keys and values of equally long sequences, (layers, B, KV, length, D)."""

    def __init__(self, shape: Shape, rows: int, length: int, memory: Tensor) -> None:
        """Lie in one-dimensional memory of at least `elements`; nothing in it is cleared.

        Nothing is read before it is written.
        """
        size = (2, shape.num_layers, rows, shape.num_kv_heads, length, shape.head_dim)
        self._keys, self._values = memory[: math.prod(size)].reshape(size)

    @staticmethod
    def elements(shape: Shape, rows: int, length: int) -> int:
        """Return how many elements keys and values of that many sequences take."""
        return 2 * shape.num_layers * rows * shape.num_kv_heads * length * shape.head_dim

    def filling(self, first: int) -> Attend:
        """Return causal attention that keeps keys and values of rows from `first` on."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = slice(first, first + q.shape[0])
            self._keys[layer, rows, :, : k.shape[2]] = k
            self._values[layer, rows, :, : v.shape[2]] = v
            return causal(layer, q, k, v)

        return attend

    def next_token(self, position: int) -> Attend:
        """Return attention of one token at a position over all before it and itself."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer, :, :, position] = k[:, :, 0]
            self._values[layer, :, :, position] = v[:, :, 0]
            keys = self._keys[layer, :, :, : position + 1]
            values = self._values[layer, :, :, : position + 1]
            # The query heads that share a key head stand where a sequence's tokens would.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
            context = functional.scaled_dot_product_attention(grouped, keys, values)
            return context.reshape(q.shape)

        return attend


def hidden_states(
    weights: Weights,
    shape: Shape,
    tokens: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attend = causal,
) -> Tensor:
    """Return (B, T, hidden) states after the last norm, of (B, T) tokens.

    The weights are merged ones; `rope` holds the table's rows of these T positions.
    """
    cos, sin = (each[None, :, None] for each in rope)
    x = functional.embedding(tokens, weights[EMBED])
    num_rotated = shape.num_heads + shape.num_kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (shape.hidden_size,), weights[name], shape.norm_epsilon)

    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}"
        h = norm(x, f"{prefix}.attn_norm.weight")
        qkv = functional.linear(h, weights[f"{prefix}.attn_qkv.weight"])
        heads = qkv.reshape(*tokens.shape, -1, shape.head_dim)
        first, second = heads[:, :, :num_rotated].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        q, k = rotated.to(qkv.dtype).transpose(1, 2).split((shape.num_heads, shape.num_kv_heads), 1)
        context = attend(layer, q, k, heads[:, :, num_rotated:].transpose(1, 2))
        context = context.transpose(1, 2).reshape(*tokens.shape, -1)
        x = x + functional.linear(context, weights[f"{prefix}.attn_output.weight"])
        h = norm(x, f"{prefix}.ffn_norm.weight")
        gate, up = functional.linear(h, weights[f"{prefix}.ffn_in.weight"]).chunk(2, dim=-1)
        h = functional.silu(gate) * up
        x = x + functional.linear(h, weights[f"{prefix}.ffn_down.weight"])
    return norm(x, NORM)
