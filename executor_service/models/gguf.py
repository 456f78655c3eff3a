"""Loads a GGUF file: header checked by `gguf_header`, tensors read by `mx.load`."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from executor_service.errors import ModelError
from executor_service.models import arrays
from executor_service.models.checkpoint import Checkpoint, quantized_weight
from executor_service.models.config import config_from_gguf
from executor_service.models.digest import remembered_digest
from executor_service.models.files import mapped
from executor_service.models.gguf_header import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from executor_service.models.checkpoint import Float32
    from executor_service.models.gguf_header import GgufHeader
    from isobatch_kernels.program import Weight

GROUP_SIZE: Final = 32  # of every quantised type that mx.load keeps packed
FREQUENCY_FACTORS: Final = "rope_freqs.weight"

_TOP_NAMES: Final = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_LAYER_NAMES: Final = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_TENSOR_NAME: Final = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def read_gguf_header(path: Path) -> GgufHeader:
    """Check a file and return its header; raises ModelError."""
    with mapped(path) as data:
        return read_header(data, str(path))


def our_name(tensor: str, source: str) -> str:
    """Translate a tensor's name; one that no Program uses is refused, not ignored."""
    match = _TENSOR_NAME.fullmatch(tensor)
    if match:
        layer, base, part = match.groups()
        known = _TOP_NAMES.get(base) if layer is None else _LAYER_NAMES.get(base)
        if known is not None:
            prefix = "" if layer is None else f"layers.{int(layer)}."
            return f"{prefix}{known}" + (".bias" if part == "bias" else "")
    raise ModelError(f"[gguf] tensors must be those of llama or qwen2, got {tensor}: {source}")


def load_gguf(path: Path, header: GgufHeader) -> Checkpoint:
    """Load all weights of a checked file; raises ModelError."""
    source = str(path)
    names = {
        tensor: our_name(tensor, source) for tensor in header.tensors if tensor != FREQUENCY_FACTORS
    }
    # The sizes are read again below, with the weights; what cannot be served is refused before
    # gigabytes of them are.
    config_from_gguf(
        header.metadata,
        vocab_size=1,
        tied_embeddings=True,
        frequency_factors=None,
        source=source,
    )
    digest = _digest(path, header)
    try:
        tensors = mx.load(source, format="gguf")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"[gguf] mx.load must accept the file, got {error}: {source}") from error
    if not isinstance(tensors, dict):
        raise ModelError(f"[gguf] mx.load must return tensors, got {type(tensors)}: {source}")
    weights: dict[str, Weight] = {}
    vectors: dict[str, Float32] = {}
    for tensor, name in names.items():
        if len(header.tensors[tensor].shape) == 1:
            vectors[name] = arrays.vector(tensor, tensors.pop(tensor), source)
        else:
            weights[name] = _weight(tensor, tensors, source)
    embed = weights.get("embed")
    if embed is None:
        raise ModelError(f"[gguf] token_embd.weight must be in the file, got nothing: {source}")
    config = config_from_gguf(
        header.metadata,
        vocab_size=embed.num_outputs,
        tied_embeddings="head" not in weights,
        frequency_factors=_frequency_factors(tensors, source),
        source=source,
    )
    return Checkpoint(
        config=config,
        weights=weights,
        vectors=vectors,
        num_parameters=sum(info.num_elements for info in header.tensors.values()),
        digest=digest,
        source=path.name,
    )


def _digest(path: Path, header: GgufHeader) -> str:
    with ExitStack() as stack:
        data = stack.enter_context(mapped(path))
        stored = {
            info.name: stack.enter_context(data[info.offset : info.offset + info.num_bytes])
            for info in header.tensors.values()
        }
        return remembered_digest([path], stored)


def _weight(tensor: str, tensors: dict[str, mx.array], source: str) -> Weight:
    array = tensors.pop(tensor)
    base = tensor.removesuffix(".weight")
    scales = tensors.pop(f"{base}.scales", None)
    if scales is None:
        return arrays.matrix(tensor, array, source)
    biases = tensors.pop(f"{base}.biases", None)
    return quantized_weight(
        tensor,
        arrays.to_numpy(array),
        arrays.scales(f"scales of {tensor}", scales, source),
        None if biases is None else arrays.scales(f"biases of {tensor}", biases, source),
        GROUP_SIZE,
        source,
    )


def _frequency_factors(tensors: Mapping[str, mx.array], source: str) -> tuple[float, ...] | None:
    array = tensors.get(FREQUENCY_FACTORS)
    if array is None:
        return None
    return tuple(float(value) for value in arrays.vector(FREQUENCY_FACTORS, array, source))
