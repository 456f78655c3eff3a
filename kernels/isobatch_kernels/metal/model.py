"""A Program's weights and layouts on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.metal.activations import ActivationLayout, NormWeight
from isobatch_kernels.metal.linear import (
    DeviceDense,
    DeviceWeight,
    dense_to_device,
    to_device,
)
from isobatch_kernels.metal.weights import pack_dense, pack_quantized
from isobatch_kernels.program import (
    Buffer,
    DenseWeight,
    Embed,
    Linear,
    NormQuantize,
    Program,
    QuantizedWeight,
    Weight,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch_kernels.metal.arrays import ArrayLibrary, LibraryArray


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """The parts of one linear layer: matrices of equal format merged, so usually one."""

    parts: tuple[DeviceWeight | DeviceDense, ...]
    biases: tuple[LibraryArray | None, ...]  # one a part
    widths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Outputs."""
        return sum(self.widths)


@dataclass(frozen=True, slots=True)
class DeviceEmbedding:
    """An embedding: shares its arrays with a tied LM head when that is quantised."""

    quantized: DeviceWeight | None
    dense_values: LibraryArray | None
    width: int


@dataclass(slots=True)
class DeviceModel:
    """Weights by op index, repacked and moved once. Equal sources share one copy."""

    arrays: ArrayLibrary
    program: Program
    layouts: dict[str, ActivationLayout] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    norms: dict[int, NormWeight] = field(default_factory=dict)
    linears: dict[int, DeviceLinear] = field(default_factory=dict)
    embeddings: dict[int, DeviceEmbedding] = field(default_factory=dict)
    _shared: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for buffer in self.program.buffers:
            self.widths[buffer.name] = buffer.width
            if buffer.activation_block:
                self.layouts[buffer.name] = _layout(buffer)
        for index, op in enumerate(self.program.ops):
            match op:
                case NormQuantize():
                    weight = np.ascontiguousarray(op.weight, np.float32)
                    norm = NormWeight(self.arrays.array(weight), len(weight), op.epsilon)
                    self.norms[index] = norm
                case Linear():
                    self.linears[index] = self._linear(op)
                case Embed():
                    self.embeddings[index] = self._embedding(op.weight)
                case _:
                    pass
        self._shared.clear()  # held sources by identity while building

    def _parts(self, weights: Sequence[Weight]) -> tuple[DeviceWeight | DeviceDense, ...]:
        key = tuple(part for w in weights for part in _identity(w))
        if key not in self._shared:
            quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
            dense = [w for w in weights if isinstance(w, DenseWeight)]
            if quantized and dense:
                raise ValueError("[metal] merged weights must be all quantised or all dense")
            parts: list[DeviceWeight | DeviceDense] = []
            parts += [to_device(self.arrays, p) for p in pack_quantized(quantized)]
            parts += [dense_to_device(self.arrays, p) for p in pack_dense(dense)]
            self._shared[key] = (tuple(parts), weights)
        found: tuple[DeviceWeight | DeviceDense, ...] = self._shared[key][0]
        return found

    def _linear(self, op: Linear) -> DeviceLinear:
        if op.policy != "exact":
            raise ValueError(f"[metal] policy must be exact, got {op.policy!r}")
        parts = self._parts(op.weights)
        widths = tuple(
            p.host.num_outputs if isinstance(p, DeviceWeight) else p.num_outputs for p in parts
        )
        biases: list[LibraryArray | None] = [None] * len(parts)
        if op.bias is not None:
            cuts = np.cumsum(widths)[:-1]
            pieces = np.split(np.ascontiguousarray(op.bias, np.float32), cuts)
            biases = [self.arrays.array(_padded(piece)) for piece in pieces]
        if sum(widths) != self.widths[op.out]:
            raise ValueError(
                f"[metal] {op.name or 'linear'}: out must be {sum(widths)} wide, "
                f"got {self.widths[op.out]}"
            )
        return DeviceLinear(parts, tuple(biases), widths)

    def _embedding(self, weight: Weight) -> DeviceEmbedding:
        if isinstance(weight, DenseWeight):
            values = self.arrays.array(np.ascontiguousarray(weight.values))
            return DeviceEmbedding(None, values, weight.num_inputs)
        part = self._parts((weight,))[0]
        if not isinstance(part, DeviceWeight):
            raise TypeError("[metal] a quantised weight must pack to a quantised one")
        return DeviceEmbedding(part, None, weight.num_inputs)


def _identity(weight: Weight) -> tuple[int, ...]:
    if isinstance(weight, QuantizedWeight):
        return id(weight.packed), id(weight.scales), id(weight.biases)
    return (id(weight.values),)


def _padded(values: Any) -> Any:
    return (
        values
        if len(values) >= 8
        else np.concatenate([values, np.zeros(8 - len(values), np.float32)])
    )


def _layout(buffer: Buffer) -> ActivationLayout:
    block = buffer.activation_block
    return ActivationLayout(buffer.width, block, 16 if buffer.half_sums else block)
