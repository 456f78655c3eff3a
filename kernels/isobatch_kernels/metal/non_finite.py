"""Finds rows that met a NaN, an infinity or a magnitude of 2^96 or more (numerics.md section 0).

Kernels that meet such a value make their row's output NaN, and every later op hands that on. So a
look at the residual stream after the last layer, and at the scales of the wanted rows, tells
whether anything happened; only then is the step run again to name the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.metal.activations import Activations, find_non_finite
from isobatch_kernels.program import (
    GateQuantize,
    Linear,
    NormQuantize,
    Quantize,
    RopeWriteKV,
    RowStatistics,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from isobatch_kernels.metal.arrays import ArrayLibrary, LibraryArray
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.metal.model import DeviceModel
    from isobatch_kernels.program import Op, Program
    from isobatch_kernels.step import Float32, Int32, StepInput

    Flags = npt.NDArray[np.bool_]

_LIMIT_BITS = 0x6F800000  # 2^96


def _watched(program: Program) -> list[str]:
    """Buffers whose end shows any earlier trouble: residual streams, or else all fp32 rows."""
    residuals = {op.residual for op in program.ops if isinstance(op, Linear) and op.residual}
    wanted = {getattr(op, "out", "") for op in program.ops if getattr(op, "wanted_only", False)}
    rows = {b.name for b in program.buffers if not b.activation_block} - wanted
    return sorted(residuals or rows)


def watch(launcher: Launcher, model: DeviceModel, buffers: dict[str, Any], tokens: int) -> Watched:
    """Enqueues the look at what a step's ops left behind."""
    flags: list[LibraryArray] = []
    scales: list[Activations] = []
    for name in _watched(model.program):
        if name in buffers and not isinstance(buffers[name], Activations):
            flags.append(find_non_finite(launcher, buffers[name], tokens, model.widths[name]))
    for op in model.program.ops:
        if isinstance(op, NormQuantize) and op.wanted_only and op.out in buffers:
            value = buffers[op.out]
            if isinstance(value, Activations):
                scales.append(value)
    return Watched(tuple(flags), tuple(scales), tokens)


@dataclass(frozen=True, slots=True)
class Watched:
    """Arrays that tell whether a step met a value that is not finite."""

    flags: tuple[LibraryArray, ...]  # each (tokens,)
    scales: tuple[Activations, ...]
    tokens: int

    def arrays(self) -> list[LibraryArray]:
        """All of them."""
        return [*self.flags, *(value.d for value in self.scales)]

    def is_suspicious(self, arrays: ArrayLibrary) -> bool:
        """Waits for them; true where the step has to be looked at op by op."""
        return any(arrays.numpy(each)[: self.tokens].any() for each in self.flags) or any(
            np.isnan(_scales(arrays, value)).any() for value in self.scales
        )


def _scales(arrays: ArrayLibrary, value: Activations) -> Float32:
    blocks = value.layout.blocks
    scales: Float32 = arrays.numpy(value.d)[: value.rows * blocks].reshape(value.rows, blocks)
    return scales


def _any_in_row(values: Flags) -> Flags:
    return np.asarray(values.any(axis=1), np.bool_)


def _too_large(values: Float32) -> Flags:
    bits = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    return _any_in_row(bits >= np.uint32(_LIMIT_BITS))


def _flags_of(
    op: Op, model: DeviceModel, arrays: ArrayLibrary, buffers: dict[str, Any]
) -> Flags | None:
    """Rows in which this op, just run, met such a value; None for ops that do not look."""
    match op:
        case NormQuantize() | Quantize() | GateQuantize():
            value = buffers.get(op.out)
            if isinstance(value, Activations):
                return _any_in_row(np.isnan(_scales(arrays, value)))
        case RopeWriteKV():
            return _too_large(arrays.numpy(buffers[op.qkv]).reshape(-1, model.widths[op.qkv]))
        case Linear():
            value = buffers.get(op.x)
            if value is not None and not isinstance(value, Activations):
                return _too_large(arrays.numpy(value).reshape(-1, model.widths[op.x]))
        case _:
            pass
    return None


def find_first_ops(
    program: Program,
    model: DeviceModel,
    arrays: ArrayLibrary,
    step: StepInput,
    max_logits: Float32,
    advance: Callable[[int], dict[str, Any]],
) -> Int32:
    """(S,) index of the first op that met such a value in each token row, else -1.

    Args:
        program: the program.
        model: its widths.
        arrays: reads device arrays.
        step: the step.
        max_logits: (L,) largest logit of each wanted position.
        advance: runs op i and gives the buffers.
    """
    none = len(program.ops)
    first = np.full(len(step.token_ids), none)
    for index, op in enumerate(program.ops):
        flags = _flags_of(op, model, arrays, advance(index))
        if isinstance(op, RowStatistics) and len(step.wanted):
            flags = ~(np.abs(max_logits) < np.float32(2.0**96))
        if flags is None:
            continue
        at = (step.wanted if _is_wanted(op) else np.arange(len(first)))[flags]
        first[at] = np.minimum(first[at], index)
    rows = [
        first[a:b].min()
        for a, b in zip(step.query_start_loc[:-1], step.query_start_loc[1:], strict=True)
    ]
    return np.array([-1 if r == none else r for r in rows], np.int32)


def _is_wanted(op: Op) -> bool:
    return isinstance(op, RowStatistics) or bool(getattr(op, "wanted_only", False))
