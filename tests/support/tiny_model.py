"""Tiny model directories and GGUF files, made on the spot from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tokenizer_document

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny model; K of every matrix must be a multiple of the group size."""

    architecture: str = "llama"
    hidden_size: int = 96
    intermediate_size: int = 160
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 301
    context_length: int = 128
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = True
    rope_scaling: dict[str, Any] | None = None
    window: int = 0  # visible keys of every layer (qwen2); 0 for all


def tiny_weights(shape: TinyShape, seed: int = 0) -> dict[str, Float32]:
    """Random weights under Hugging Face names, with biases where the architecture has them."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Float32:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    def near(value: float, size: int) -> Float32:
        return np.asarray(value + 0.1 * rng.standard_normal(size), np.float32)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, hidden) * np.float32(4),
        "model.norm.weight": near(1, hidden),
    }
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocab_size, hidden) * np.float32(4)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": near(1, hidden),
            f"{prefix}.post_attention_layernorm.weight": near(1, hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(key, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(key, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, query),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
        if shape.architecture == "qwen2":
            for name, size in (("q", query), ("k", key), ("v", key)):
                weights[f"{prefix}.self_attn.{name}_proj.bias"] = near(0, size)
    return weights


def config_json(shape: TinyShape) -> dict[str, Any]:
    """config.json of a shape."""
    return {
        "model_type": shape.architecture,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "rope_scaling": shape.rope_scaling,
        "hidden_act": "silu",
        "use_sliding_window": shape.window > 0,
        "sliding_window": shape.window or None,
        "max_window_layers": 0,
        "eos_token_id": 2,
    }


@dataclass(frozen=True, slots=True)
class Storage:
    """How matrices are stored: quantised by MLX, or dense."""

    bits: int = 0  # 0: dense
    group_size: int = 32
    dtype: str = "float16"  # of dense matrices, scales and biases: float16, bfloat16, float32
    # Modules (by the end of their name) with other bits, and modules that stay dense.
    overrides: tuple[tuple[str, int], ...] = ()


def write_directory(
    path: Path, shape: TinyShape, storage: Storage, seed: int = 0
) -> dict[str, Float32]:
    """Writes a model directory and returns its weights as an exact reader gets them (fp32)."""
    path.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, mx.array] = {}
    exact: dict[str, Float32] = {}
    quantization: dict[str, Any] = {"group_size": storage.group_size, "bits": storage.bits}
    dtype = getattr(mx, storage.dtype)
    for name, values in tiny_weights(shape, seed).items():
        module = name.rpartition(".")[0]
        bits = storage.bits
        for ending, other in storage.overrides:
            if module.endswith(ending):
                bits = other
                quantization[module] = (
                    {"group_size": storage.group_size, "bits": bits} if bits else False
                )
        array = mx.array(values).astype(dtype)
        if values.ndim == 1 or not bits:
            arrays[name] = array
            # The executor rounds fp32 matrices to fp16.
            if values.ndim == 2 and storage.dtype == "float32":
                array = array.astype(mx.float16)
            exact[name] = np.array(array.astype(mx.float32))
            continue
        packed, scales, biases = mx.quantize(array, group_size=storage.group_size, bits=bits)
        arrays |= {name: packed, f"{module}.scales": scales, f"{module}.biases": biases}
        # Dequantised in fp32 from the stored integers, scales and biases.
        exact[name] = np.array(
            mx.dequantize(
                packed,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=storage.group_size,
                bits=bits,
            )
        )
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    config = config_json(shape)
    if storage.bits:
        config["quantization"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_bytes(tokenizer_document())
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return exact
