"""mlx-lm on MLX's CPU backend, run by .venv-bench's Python: a GGUF file in, rates out (JSON).

mlx-lm's own Llama with the file's quantised weights in fp32 (fp16 scales, as the file has them, are
several times slower on this backend), equal prompts in one batch, greedy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from typing import Any, Final

import mlx.core as mx

GROUP: Final = 32
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def mlx_name(tensor: str) -> str:
    """mlx-lm's name of a GGUF tensor of a llama, with its suffix (weight, scales, biases)."""
    base, _, suffix = tensor.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if layer is None:
        return f"{_NAMES[base]}.{suffix}"
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"


def load(path: str) -> Any:
    """The model with the file's weights."""
    found = mx.load(path, format="gguf", return_metadata=True)
    if not isinstance(found, tuple):
        raise TypeError(f"[bench] mx.load must return tensors and metadata, got {type(found)}")
    tensors: dict[str, mx.array] = found[0]
    metadata: dict[str, Any] = found[1]
    weights = {
        mlx_name(name): array if array.dtype == mx.uint32 else array.astype(mx.float32)
        for name, array in tensors.items()
    }
    llama = importlib.import_module("mlx_lm.models.llama")
    nn = importlib.import_module("mlx.nn")

    def fact(name: str) -> Any:
        return metadata[f"llama.{name}"].item()

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=fact("embedding_length"),
            num_hidden_layers=fact("block_count"),
            intermediate_size=fact("feed_forward_length"),
            num_attention_heads=fact("attention.head_count"),
            num_key_value_heads=fact("attention.head_count_kv"),
            rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
            rope_theta=fact("rope.freq_base"),
            rope_traditional=True,  # a GGUF file's queries and keys are stored for pairs
            vocab_size=weights["model.embed_tokens.weight"].shape[0],
            tie_word_embeddings="lm_head.weight" not in weights,
        )
    )

    def bits(name: str, _: object) -> Any:
        scales = weights.get(f"{name}.scales")
        if scales is None:
            return False
        words = weights[f"{name}.weight"].shape[1]
        return {"group_size": GROUP, "bits": 32 * words // (GROUP * scales.shape[1])}

    nn.quantize(model, class_predicate=bits)
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model


def run(model: Any, streams: int, prompt: int, tokens: int) -> dict[str, float]:
    """Rates of prefill and of decode over all streams, in tokens a second."""
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    mx.random.seed(0)
    ids = mx.random.randint(0, 40000, (streams, prompt))
    mx.eval(ids)
    started = time.perf_counter()
    following = mx.argmax(model(ids, cache=cache)[:, -1], axis=-1)
    mx.eval(following)
    prefilled = time.perf_counter()
    for _ in range(tokens):
        following = mx.argmax(model(following[:, None], cache=cache)[:, -1], axis=-1)
        mx.eval(following)
    ended = time.perf_counter()
    return {
        "prefill": streams * prompt / (prefilled - started),
        "decode": streams * tokens / (ended - prefilled),
    }


def main() -> None:
    """Loads once and runs every number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", default="1")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = load(args.model)
    run(model, 1, 2, 1)
    counts = [int(count) for count in args.streams.split(",")]
    print(json.dumps({n: run(model, n, args.prompt, args.tokens) for n in counts}))


if __name__ == "__main__":
    main()
