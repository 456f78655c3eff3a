"""Loads a located model: weights, Program and tokenizer. Uses MLX: for the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor_service.models.gguf import load_gguf, read_gguf_header
from executor_service.models.llama import build_llama
from executor_service.models.qwen2 import build_qwen2
from executor_service.models.safetensors_loader import load_directory
from executor_service.models.tokenizer_files import tokenizer_from_directory
from executor_service.models.tokenizer_gguf import tokenizer_from_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from executor_service.models.checkpoint import Checkpoint, TokenizerData
    from executor_service.models.config import ModelConfig
    from executor_service.models.registry import ModelLocation
    from isobatch_kernels.program import Program

BUILDERS: Final[Mapping[str, Callable[[Checkpoint], Program]]] = {
    "llama": build_llama,
    "qwen2": build_qwen2,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready for a backend."""

    model_id: str
    config: ModelConfig
    program: Program
    tokenizer: TokenizerData
    weights_digest: str
    num_parameters: int
    source: str


def load_model(location: ModelLocation) -> LoadedModel:
    """Load a model; raises ModelError for damaged or unknown files."""
    if location.path.is_dir():
        tokenizer = tokenizer_from_directory(location.path)
        checkpoint = load_directory(location.path)
    else:
        header = read_gguf_header(location.path)
        tokenizer = tokenizer_from_gguf(header.metadata, str(location.path))
        checkpoint = load_gguf(location.path, header)
    return LoadedModel(
        model_id=location.model_id,
        config=checkpoint.config,
        program=BUILDERS[checkpoint.config.architecture](checkpoint),
        tokenizer=tokenizer,
        weights_digest=checkpoint.digest,
        num_parameters=checkpoint.num_parameters,
        source=checkpoint.source,
    )
