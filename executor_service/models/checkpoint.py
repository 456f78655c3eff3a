"""What a loader hands to a Program builder: config, tensors under our names, tokenizer, identity.

Names: `embed`, `norm`, `head`, and for each layer `layers.3.` followed by `attention_norm`, `q`,
`k`, `v`, `o`, `mlp_norm`, `gate`, `up` or `down`; the bias vector of a matrix is `<name>.bias`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from executor_service.errors import ModelError
from isobatch_kernels.program import DenseType, DenseWeight, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from executor_service.models.config import ModelConfig
    from isobatch_kernels.program import Array, Weight

    Float32 = npt.NDArray[np.float32]

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
VECTORS = ("attention_norm", "mlp_norm")
GROUP_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """All that turns text into ids and back."""

    tokenizer_json: bytes  # a document for the `tokenizers` library
    chat_template: str  # empty when the model has none
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    special_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A loaded model, before its Program is built."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    vectors: Mapping[str, Float32]
    num_parameters: int
    digest: str  # SHA-256 over tensor names and stored bytes, hex
    source: str  # file or folder name

    def matrix(self, name: str, num_outputs: int, num_inputs: int) -> Weight:
        """Return a weight; raises ModelError when it is missing or has another shape."""
        weight = self.weights.get(name)
        if weight is None:
            raise ModelError(f"[model] {name} must be in the file, got nothing: {self.source}")
        shape = (weight.num_outputs, weight.num_inputs)
        if shape != (num_outputs, num_inputs):
            raise ModelError(
                f"[model] {name} must have shape {(num_outputs, num_inputs)}, "
                f"got {shape}: {self.source}"
            )
        return weight

    def vector(self, name: str, size: int) -> Float32:
        """Return a vector; raises ModelError when it is missing or has another size."""
        vector = self.vectors.get(name)
        if vector is None:
            raise ModelError(f"[model] {name} must be in the file, got nothing: {self.source}")
        if vector.shape != (size,):
            raise ModelError(
                f"[model] {name} must have shape {(size,)}, got {vector.shape}: {self.source}"
            )
        return vector


def require_finite(name: str, values: Array, source: str, *, bfloat16: bool = False) -> None:
    """Raise ModelError when a float array holds a NaN or an infinity.

    `bfloat16` says that a uint16 array holds bfloat16 bits.
    """
    if bfloat16 or values.dtype == np.float16:
        mask = 0x7F80 if bfloat16 else 0x7C00
        finite = not bool(np.any((values.view(np.uint16) & mask) == mask))
    else:
        finite = bool(np.isfinite(values).all())
    if not finite:
        raise ModelError(f"[model] {name} must be finite, got a NaN or an infinity: {source}")


def dense_weight(name: str, values: Array, dtype: DenseType, source: str) -> DenseWeight:
    """Check a dense matrix: float16, or uint16 holding bfloat16 bits."""
    require_finite(name, values, source, bfloat16=dtype is DenseType.BFLOAT16)
    return DenseWeight(np.ascontiguousarray(values), dtype)


def quantized_weight(
    name: str, packed: Array, scales: Array, biases: Array | None, group_size: int, source: str
) -> QuantizedWeight:
    """Check the parts of a quantised matrix against each other; the bits follow from the shapes."""
    if packed.ndim != 2 or scales.ndim != 2 or packed.shape[0] != scales.shape[0]:
        raise ModelError(
            f"[model] {name} must have matching rows of weights and scales, "
            f"got {packed.shape} and {scales.shape}: {source}"
        )
    num_inputs = scales.shape[1] * group_size
    bits, rest = divmod(packed.shape[1] * 32, max(num_inputs, 1))
    if group_size not in GROUP_SIZES or rest or not 2 <= bits <= 8:
        raise ModelError(
            f"[model] {name} must be packed as 2 to 8 bits in groups of {GROUP_SIZES}, "
            f"got {packed.shape[1]} words for {num_inputs} inputs in groups of {group_size}: "
            f"{source}"
        )
    if biases is not None and biases.shape != scales.shape:
        raise ModelError(
            f"[model] biases of {name} must have shape {scales.shape}, got {biases.shape}: {source}"
        )
    require_finite(f"scales of {name}", scales, source)
    if biases is not None:
        require_finite(f"biases of {name}", biases, source)
    return QuantizedWeight(packed, scales, biases, bits, group_size)
