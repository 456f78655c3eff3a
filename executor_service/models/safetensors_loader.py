"""Loads a Hugging Face-style directory: config.json and safetensors, dense or quantised by MLX."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from executor_service.errors import ModelError
from executor_service.models import arrays
from executor_service.models.checkpoint import Checkpoint, quantized_weight
from executor_service.models.config_json import config_from_json
from executor_service.models.digest import remembered_digest
from executor_service.models.files import mapped, read_json
from executor_service.models.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from executor_service.models.checkpoint import Float32
    from executor_service.models.safetensors_header import TensorInfo
    from isobatch_kernels.program import Weight

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
CONFIG_NAME: Final = "config.json"

_LONGEST_NAME: Final = 200  # characters; far above any, and below what a file system refuses
_TOP_NAMES: Final = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
_LAYER_NAMES: Final = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Tables that old exports carry along; the rotary table is computed from the config.
_IGNORED: Final = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def load_directory(path: Path) -> Checkpoint:
    """Load all weights of a model directory; raises ModelError."""
    values = read_json(path / CONFIG_NAME)
    config = config_from_json(values, str(path / CONFIG_NAME))
    quantization = _quantization(values, str(path / CONFIG_NAME))
    files = weight_files(path)
    headers, digest = _check_files(files)
    tensors: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = mx.load(str(file), format="safetensors")
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"[safetensors] mx.load must accept the file, got {error}: {file}"
            ) from error
        if isinstance(loaded, dict):
            tensors.update(loaded)
    weights: dict[str, Weight] = {}
    vectors: dict[str, Float32] = {}
    source = str(path)
    num_parameters = 0
    for tensor, info in headers.items():
        module, _, part = tensor.rpartition(".")
        if part in ("scales", "biases") or _IGNORED.fullmatch(tensor):
            continue
        name = our_name(module, tensor, source)
        if name == "head" and config.tied_embeddings:
            continue
        if part == "bias":
            vectors[f"{name}.bias"] = arrays.vector(tensor, tensors[tensor], source)
        elif part == "weight" and len(info.shape) == 1:
            vectors[name] = arrays.vector(tensor, tensors[tensor], source)
            num_parameters += info.shape[0]
        elif part == "weight":
            weight = _weight(module, tensors, quantization, source)
            weights[name] = weight
            num_parameters += weight.num_outputs * weight.num_inputs
        else:
            raise _foreign(tensor, source)
        tensors.pop(tensor)
    return Checkpoint(config, weights, vectors, num_parameters, digest, path.name)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory; raises ModelError when one is missing."""
    index = path / INDEX_NAME
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelError(f"[safetensors] weight_map must name files, got nothing: {index}")
        names = sorted({str(name) for name in mapping.values()})
        for name in names:
            if name in (".", "..") or "/" in name or "\\" in name or len(name) > _LONGEST_NAME:
                raise ModelError(
                    f"[safetensors] weight_map must name files here, got {name:.80}: {index}"
                )
        files = [path / name for name in names]
    elif (path / SINGLE_NAME).is_file():
        files = [path / SINGLE_NAME]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"[safetensors] *.safetensors files must be there, got none: {path}")
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"[safetensors] every file of the index must be there, got none: {file}"
            )
    return files


def our_name(module: str, tensor: str, source: str) -> str:
    """Translate a module's name; one that no Program uses is refused, not ignored."""
    match = _LAYER.fullmatch(module)
    known = _LAYER_NAMES.get(match.group(2)) if match else _TOP_NAMES.get(module)
    if known is None:
        raise _foreign(tensor, source)
    return f"layers.{int(match.group(1))}.{known}" if match else known


def _foreign(tensor: str, source: str) -> ModelError:
    return ModelError(
        f"[safetensors] tensors must be those of llama or qwen2, got {tensor}: {source}"
    )


def _check_files(files: list[Path]) -> tuple[dict[str, TensorInfo], str]:
    """Check every file's header; return all tensors by name, and the digest of the whole model."""
    headers: dict[str, TensorInfo] = {}
    stored: dict[str, memoryview] = {}
    with ExitStack() as stack:
        for file in files:
            data = stack.enter_context(mapped(file))
            for name, info in read_header(data, str(file)).items():
                if name in headers:
                    raise ModelError(
                        f"[safetensors] tensor names must be unique, got {name}: {file}"
                    )
                headers[name] = info
                stored[name] = stack.enter_context(data[info.offset : info.offset + info.num_bytes])
        return headers, remembered_digest(files, stored)


def _quantization(values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """Return MLX's `quantization` object; empty for a dense model."""
    raw = values.get("quantization")
    if raw is None:
        other = values.get("quantization_config")
        if other is not None:
            method = other.get("quant_method") if isinstance(other, dict) else other
            raise ModelError(
                f"[safetensors] weights must be quantised by MLX, got {method}: {source}"
            )
        return {}
    if not isinstance(raw, dict):
        raise ModelError(f"[safetensors] quantization must be an object, got {raw!r:.80}: {source}")
    if raw.get("mode", "affine") != "affine":
        raise ModelError(f"[safetensors] quantization must be affine, got {raw['mode']}: {source}")
    return raw


def _weight(
    module: str,
    tensors: dict[str, mx.array],
    quantization: Mapping[str, object],
    source: str,
) -> Weight:
    array = tensors[f"{module}.weight"]
    scales = tensors.pop(f"{module}.scales", None)
    biases = tensors.pop(f"{module}.biases", None)
    if scales is None:
        return arrays.matrix(f"{module}.weight", array, source)
    own = quantization.get(module)
    settings = own if isinstance(own, dict) else quantization
    group_size, bits = settings.get("group_size"), settings.get("bits")
    if type(group_size) is not int or type(bits) is not int or array.dtype != mx.uint32:
        raise ModelError(
            f"[safetensors] {module} must have group_size, bits and packed words, "
            f"got {group_size}, {bits} and {array.dtype}: {source}"
        )
    weight = quantized_weight(
        module,
        arrays.to_numpy(array),
        arrays.scales(f"scales of {module}", scales, source),
        None if biases is None else arrays.scales(f"biases of {module}", biases, source),
        group_size,
        source,
    )
    if weight.bits != bits:
        raise ModelError(
            f"[safetensors] {module} must have {bits} bits, got {weight.bits}: {source}"
        )
    return weight
