"""A model as data: the flat list of typed ops that backends interpret.

A model file builds one `Program` at load and computes nothing itself. Ops name buffers; a buffer
is either fp32 rows or quantised activations (numerics.md section 2). Every op works on all tokens
of a step, except where it says otherwise. This module must not know any backend.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class DenseType(enum.Enum):
    """Storage type of a dense weight: what its activations are rounded to."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Affine groups along K: w = scale*q + bias (MLX layout)."""

    packed: Array  # (N, K*bits/32) uint32, little-endian bit stream along K
    scales: Array  # (N, K/group_size) float16 or float32 (bfloat16 arrives widened to float32)
    biases: Array | None  # like scales; None means +0
    bits: int  # 2..8
    group_size: int  # 16, 32, 64 or 128

    @property
    def num_outputs(self) -> int:
        return int(self.packed.shape[0])

    @property
    def num_inputs(self) -> int:
        return int(self.packed.shape[1]) * 32 // self.bits


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix that the checkpoint left unquantised."""

    values: Array  # (N, K) float16, or uint16 holding bfloat16 bits
    dtype: DenseType

    @property
    def num_outputs(self) -> int:
        return int(self.values.shape[0])

    @property
    def num_inputs(self) -> int:
        return int(self.values.shape[1])


Weight = QuantizedWeight | DenseWeight


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named per-token buffer."""

    name: str
    width: int
    # 0: fp32 rows. 32 or 64: quantised activations in blocks of that many elements.
    activation_block: int = 0
    # Quantised only: some consumer has groups of 16, so sums of half blocks are needed.
    half_sums: bool = False


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one model."""

    base: float
    rotary_dim: int
    interleaved: bool  # pairs (2i, 2i+1); else (i, i + rotary_dim/2)
    position_scale: float = 1.0
    frequency_factors: tuple[float, ...] | None = None  # (rotary_dim/2,)


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """out = embedding rows of the step's token ids."""

    weight: Weight
    out: str


@dataclass(frozen=True, slots=True, eq=False)
class NormQuantize:
    """out = quantise(rms_norm(x) * weight); into an fp32 buffer it is the norm alone."""

    x: str
    weight: Array  # (K,) float32
    epsilon: float
    out: str
    # Only the wanted positions: out has one row for each of them (the LM head's input).
    wanted_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Quantize:
    """out = quantise(x)."""

    x: str
    out: str


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """out = x @ weight.T, then + bias, then + residual buffer.

    Several weights of equal K are one merged matrix, concatenated along N. `out` may be the
    residual buffer itself. `x` is a quantised buffer for quantised weights and an fp32 buffer for
    dense ones, or under a float policy.
    """

    x: str
    weights: tuple[Weight, ...]
    out: str
    bias: Array | None = None  # (N,) float32
    residual: str | None = None
    policy: str = "exact"  # kernel policy (kernel_policy.py); under a float one, x is fp32 rows
    threshold_rows: int = 0  # of the policy "threshold": most rows computed one by one
    wanted_only: bool = False  # rows are wanted positions, `out` is the logits
    name: str = ""  # for messages, for example "layers.3.mlp.down"


@dataclass(frozen=True, slots=True, eq=False)
class RopeWriteKV:
    """Rotary embedding and cache write on qkv rows (q | k | v).

    Queries are roped and scaled in place; keys are roped and, with values, cached as fp16.
    """

    qkv: str
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttention:
    """out (num_heads*head_dim) = attention of the queries in qkv over the layer's cache."""

    qkv: str
    layer: int
    out: str
    window: int = 0  # visible keys, the token's own included; 0 for all


@dataclass(frozen=True, slots=True, eq=False)
class GateQuantize:
    """On gate_up rows (gate | up): out = quantise(silu(gate) * up).

    Into an fp32 buffer the result is not quantised.
    """

    gate_up: str
    out: str


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Joins the ranks' parts of a buffer; nothing to do for one rank."""

    x: str


@dataclass(frozen=True, slots=True, eq=False)
class Observe:
    """A place where digests and provenance are taken; computes nothing."""

    x: str
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Statistics of the logits of wanted positions (numerics.md section 5)."""

    logits: str


Op = (
    Embed
    | NormQuantize
    | Quantize
    | Linear
    | RopeWriteKV
    | PagedAttention
    | GateQuantize
    | AllGather
    | Observe
    | RowStatistics
)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of one model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    attention_scale: float  # the fp32 constant that queries are multiplied with


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One model, ready to interpret."""

    dimensions: Dimensions
    rope: RopeSpec
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    names: tuple[str, ...] = field(default=())  # one label per op for messages; empty or len(ops)
    # 12, or 8 for the faster and coarser class (numerics.md section 7).
    activation_bits: int = 12
