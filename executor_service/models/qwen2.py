"""The Qwen2 family (Qwen2, Qwen2.5): as Llama, with bias vectors on q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_service.models.layers import ProgramBuilder

if TYPE_CHECKING:
    from executor_service.models.checkpoint import Checkpoint
    from isobatch_kernels.program import Program


def build_qwen2(checkpoint: Checkpoint) -> Program:
    """Return the Program; raises ModelError for missing or misshapen tensors."""
    builder = ProgramBuilder(checkpoint)
    builder.embed()
    for layer in range(checkpoint.config.num_layers):
        builder.attention(layer, bias=True)
        builder.mlp(layer)
    builder.head()
    return builder.build()
