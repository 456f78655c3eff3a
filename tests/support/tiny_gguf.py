"""Writes tiny GGUF files: header, metadata, and tensors quantised here from fp32."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.tiny_model import TinyShape, tiny_weights

Float32 = npt.NDArray[np.float32]

TYPE_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def encode(values: Float32, kind: str) -> tuple[bytes, Float32]:
    """Returns a tensor's stored bytes and the exact values that they stand for."""
    if kind == "F32":
        return values.astype("<f4").tobytes(), values.astype(np.float32)
    if kind == "F16":
        half = values.astype("<f2")
        return half.tobytes(), half.astype(np.float32)
    if kind == "BF16":
        bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return bits.tobytes(), (bits.astype("<u4") << 16).view("<f4").astype(np.float32)
    blocks = values.astype(np.float32).reshape(-1, 32)
    raw, exact = _BLOCKS[kind](blocks)
    return raw.tobytes(), exact.astype(np.float32).reshape(values.shape)


def _q8_0(blocks: Float32) -> tuple[npt.NDArray[Any], Float32]:
    scale = (np.abs(blocks).max(1) / 127).astype("<f2")
    wide = np.maximum(scale.astype(np.float32), np.float32(1e-8))[:, None]
    q = np.clip(np.rint(blocks / wide), -127, 127).astype(np.int8)
    raw = np.zeros(len(blocks), [("d", "<f2"), ("q", "i1", 32)])
    raw["d"], raw["q"] = scale, q
    return raw, scale.astype(np.float32)[:, None] * q


def _nibbles(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.asarray(q[:, :16] | (q[:, 16:] << 4), np.uint8)


def _q4_0(blocks: Float32) -> tuple[npt.NDArray[Any], Float32]:
    scale = (np.abs(blocks).max(1) / 8).astype("<f2")
    wide = np.maximum(scale.astype(np.float32), np.float32(1e-8))[:, None]
    q = np.clip(np.rint(blocks / wide) + 8, 0, 15).astype(np.uint8)
    raw = np.zeros(len(blocks), [("d", "<f2"), ("q", "u1", 16)])
    raw["d"], raw["q"] = scale, _nibbles(q)
    return raw, scale.astype(np.float32)[:, None] * (q.astype(np.float32) - 8)


def _q4_1(blocks: Float32) -> tuple[npt.NDArray[Any], Float32]:
    low = blocks.min(1).astype("<f2")
    scale = ((blocks.max(1) - blocks.min(1)) / 15).astype("<f2")
    wide = np.maximum(scale.astype(np.float32), np.float32(1e-8))[:, None]
    q = np.clip(np.rint((blocks - low.astype(np.float32)[:, None]) / wide), 0, 15)
    raw = np.zeros(len(blocks), [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    raw["d"], raw["m"], raw["q"] = scale, low, _nibbles(q.astype(np.uint8))
    return raw, scale.astype(np.float32)[:, None] * q + low.astype(np.float32)[:, None]


_BLOCKS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list() if all(isinstance(each, str) for each in value):
            body = b"".join(_string(each) for each in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + body
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(f"no GGUF type for {value!r}")


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    version: int = 3,
) -> bytes:
    """Returns a file of tensors given as (type name, shape as in numpy, stored bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    body = b""
    for name, (kind, shape, raw) in tensors.items():
        header += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", TYPE_CODES[kind], len(body))
        body += raw + bytes(-len(raw) % 32)
    return header + bytes(-len(header) % 32) + body


def _tensor_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{part}"
    return f"{_NAMES[module]}.{part}"


def _interleaved(values: Float32, head_dim: int) -> Float32:
    """Rows of q or k as Llama GGUF files store them: rotary pairs side by side."""
    heads = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _halves(values: Float32, head_dim: int) -> Float32:
    heads = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


def gguf_metadata(shape: TinyShape) -> dict[str, object]:
    """Metadata of a shape, with a vocabulary of single bytes."""
    arch = shape.architecture
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"t{index}" for index in range(shape.vocab_size - len(tokens) - 2)]
    tokens += ["t", "1"]
    return {
        "general.architecture": arch,
        f"{arch}.block_count": shape.num_layers,
        f"{arch}.context_length": shape.context_length,
        f"{arch}.embedding_length": shape.hidden_size,
        f"{arch}.feed_forward_length": shape.intermediate_size,
        f"{arch}.attention.head_count": shape.num_heads,
        f"{arch}.attention.head_count_kv": shape.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.norm_epsilon,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.rope.freq_base": shape.rope_theta,
        f"{arch}.rope.dimension_count": shape.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (shape.vocab_size - 3),
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def write_gguf(
    path: Path,
    shape: TinyShape,
    kind: str,
    seed: int = 0,
    factors: Sequence[float] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> dict[str, Float32]:
    """Writes a model and returns its exact weights under Hugging Face names, in halves order.

    `kinds` gives other types to tensors whose GGUF name contains a key.
    """
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
    exact: dict[str, Float32] = {}
    for name, values in tiny_weights(shape, seed).items():
        tensor = _tensor_name(name)
        permute = shape.architecture == "llama" and ("q_proj" in name or "k_proj" in name)
        permute = permute and values.ndim == 2
        stored = _interleaved(values, shape.head_dim) if permute else values
        own = next((other for part, other in (kinds or {}).items() if part in tensor), kind)
        own = "F32" if values.ndim == 1 else own
        raw, read = encode(stored, own)
        tensors[tensor] = (own, values.shape, raw)
        exact[name] = _halves(read, shape.head_dim) if permute else read
    if factors is not None:
        raw = np.asarray(factors, "<f4").tobytes()
        tensors["rope_freqs.weight"] = ("F32", (len(factors),), raw)
    path.write_bytes(gguf_bytes(gguf_metadata(shape), tensors))
    return exact
