"""mlx-lm as a peer on the GPU: its model with random weights, its steps, and its Program for us."""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.cuda_models import (
    BITS,
    EPSILON,
    GROUP_SIZE,
    ROPE_BASE,
    LayerWeights,
    ModelShape,
    program_of,
)
from isobatch_kernels.program import Program, QuantizedWeight


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


def _weight(layer: Any) -> QuantizedWeight:
    packed, scales, biases = np.array(layer.weight), np.array(layer.scales), np.array(layer.biases)
    return QuantizedWeight(packed, scales, biases, bits=BITS, group_size=GROUP_SIZE)


def _vector(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


def program_of_peer(model: Any, shape: ModelShape) -> Program:
    """The Program of a peer model, on the same weights."""
    inner = model.model

    def layer(index: int) -> LayerWeights:
        block = inner.layers[index]
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return LayerWeights(
            qkv=tuple(_weight(p) for p in projections),
            qkv_bias=np.concatenate([_vector(p.bias) for p in projections]),
            o=_weight(attention.o_proj),
            gate_up=(_weight(mlp.gate_proj), _weight(mlp.up_proj)),
            down=_weight(mlp.down_proj),
            norms=(
                _vector(block.input_layernorm.weight),
                _vector(block.post_attention_layernorm.weight),
            ),
        )

    embedding = _weight(inner.embed_tokens)
    head = embedding if shape.tied else _weight(model.lm_head)
    return program_of(shape, embedding, head, _vector(inner.norm.weight), layer)


class PeerDecode:
    """Greedy decoding of mlx-lm at a context, the next step queued before the last is read."""

    def __init__(self, model: Any, shape: ModelShape, rows: int, context: int) -> None:
        """Fills caches with zeros up to the context."""
        cache_module = importlib.import_module("mlx_lm.models.cache")
        self._model = model
        self._caches = []
        for _ in range(shape.layers):
            cache = cache_module.KVCache()
            size = (rows, shape.kv_heads, context + 256, shape.head_dim)
            cache.keys, cache.values = (mx.zeros(size, dtype=mx.float16) for _ in range(2))
            cache.offset = context
            mx.eval(cache.keys, cache.values)
            self._caches.append(cache)
        self._token = mx.zeros((rows, 1), dtype=mx.int32)

    def step(self) -> None:
        """Queues the next step, then reads the token of the last."""
        logits = self._model(self._token, cache=self._caches)
        following = logits[:, -1].argmax(axis=-1, keepdims=True)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        np.array(self._token)
        self._token = following


def peer_prefill(model: Any, tokens: int) -> None:
    """The logits behind a prompt."""
    cache_module = importlib.import_module("mlx_lm.models.cache")
    prompt = mx.zeros((1, tokens), dtype=mx.int32)
    mx.eval(model(prompt, cache=cache_module.make_prompt_cache(model))[:, -1])


class PeerProducts:
    """`mx.quantized_matmul` on several copies of a weight, by turns, so that none is cached."""

    def __init__(self, source: QuantizedWeight, copies: int) -> None:
        """Copies the weight to the device."""
        parts: Any = (source.packed, source.scales, source.biases)
        self._arrays = [tuple(map(mx.array, parts)) for _ in range(copies)]
        mx.eval(self._arrays)

    def seconds(self, x: Any, rows: int, launches: int) -> tuple[float, Any]:
        """Of one of many products queued at once; and row 0 of the first."""
        # A copy for each launch: equal ones would be computed once.
        inputs = [mx.array(x[:rows]).astype(mx.float16) + 0 for _ in range(launches)]
        mx.eval(inputs)
        product = functools.partial(
            mx.quantized_matmul, transpose=True, group_size=GROUP_SIZE, bits=BITS
        )
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            outputs = [
                product(inputs[i], *self._arrays[i % len(self._arrays)]) for i in range(launches)
            ]
            mx.eval(outputs)
            times.append(time.perf_counter() - begin)
        return min(times[1:]) / launches, np.array(outputs[0])[0]
