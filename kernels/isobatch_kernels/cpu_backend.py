"""The CPU backend: translates a Program into the native engine and steps into its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from isobatch_kernels import _cpu
from isobatch_kernels.blocks import block_shape, check_block
from isobatch_kernels.cpu_tuning import panel_choices, panel_limits
from isobatch_kernels.deferred_step import SubmitByRun
from isobatch_kernels.greedy import GreedyRow
from isobatch_kernels.kernel_policy import EXACT
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import (
    AllGather,
    Buffer,
    DenseType,
    DenseWeight,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Observe,
    Op,
    PagedAttention,
    Program,
    Quantize,
    QuantizedWeight,
    RopeWriteKV,
    RowStatistics,
    Weight,
)
from isobatch_kernels.rope_table import rope_digest
from isobatch_kernels.step import Float32, Int32, Stat, StepInput, StepOutput

# As a numpy scalar: members of an enum cost a microsecond each time they are looked up.
_TOP_K = np.uint32(Stat.TOP_K)
_NO_LOGITS = np.empty((0, 0), dtype=np.float32)
# Most inputs that share a scale and bias in the packed weights of a float layer.
_FLOAT_BLOCK = 64


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """Sizes of a CPU backend."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int = 0  # 0: as many as this process may use


class CpuBackend(SubmitByRun):
    """Runs one Program in native code; implements `step.Backend`.

    Weights are repacked at construction; no source array is kept.
    """

    def __init__(self, program: Program, limits: CpuLimits, *, unit: str) -> None:
        """Builds the engine.

        Args:
            program: the model; its weights may be freed afterwards.
            limits: sizes of the cache, of a step and of the thread pool.
            unit: "reference", "scalar", "avx2", "vnni", "amx" or "neon".

        Raises:
            ValueError: the program is malformed, or this machine lacks the unit.
        """
        self._unit = unit
        self._limits = limits
        self._dimensions = program.dimensions
        dims, rope = program.dimensions, program.rope
        factors = None
        if rope.frequency_factors is not None:
            factors = np.asarray(rope.frequency_factors, dtype=np.float32)
        table = np.empty(dims.context_length * rope.rotary_dim, dtype=np.float32)
        _cpu.reference.rope_table(table, rope.rotary_dim, rope.base, factors, rope.position_scale)
        self._rope_digest = rope_digest(table, rope.rotary_dim)
        self._engine: _cpu.Engine | None = _cpu.Engine(
            table,
            hidden_size=dims.hidden_size,
            num_layers=dims.num_layers,
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            vocab_size=dims.vocab_size,
            context_length=dims.context_length,
            attention_scale=dims.attention_scale,
            rotary_dim=rope.rotary_dim,
            rope_interleaved=rope.interleaved,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_rows=limits.max_num_seqs,
            max_tokens=limits.max_num_batched_tokens,
            num_threads=limits.num_threads,
            unit=unit,
            activation_bits=program.activation_bits,
        )
        _Builder(self._engine, program).build()
        self._paths = PathCounter(program, unit)

    @property
    def unit(self) -> str:
        """Instruction set in use."""
        return self._unit

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        return self._rope_digest

    @property
    def num_threads(self) -> int:
        """Threads that share a step, the caller's included."""
        return self._open_engine().num_threads

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed; nothing was written.
        """
        engine = self._open_engine()
        wanted, rows = len(step.wanted), len(step.query_start_loc) - 1
        starts = np.zeros(wanted + 1, dtype=np.int32)
        if step.top_k.any():
            np.cumsum(np.where((step.statistics & _TOP_K) != 0, step.top_k, 0), out=starts[1:])
        entries = max(0, int(starts[-1]))
        argmax_ids = np.empty(wanted, dtype=np.int32)
        max_logits = np.empty(wanted, dtype=np.float32)
        normalizers = np.zeros(wanted, dtype=np.float32)
        quantile_ids = np.full(wanted, -1, dtype=np.int32)
        top_k_ids = np.empty(entries, dtype=np.int32)
        top_k_logits = np.empty(entries, dtype=np.float32)
        top_k_weights = np.empty(entries, dtype=np.float32)
        non_finite_ops = np.empty(rows, dtype=np.int32)
        forward_ns, statistics_ns = engine.run(
            *_contiguous(step),
            argmax_ids,
            max_logits,
            normalizers,
            quantile_ids,
            starts,
            top_k_ids,
            top_k_logits,
            top_k_weights,
            non_finite_ops,
        )
        return StepOutput(
            logits=engine.logits(wanted) if wanted else _NO_LOGITS,
            argmax_ids=argmax_ids,
            max_logits=max_logits,
            normalizers=normalizers,
            quantile_ids=quantile_ids,
            top_k_starts=starts,
            top_k_ids=top_k_ids,
            top_k_logits=top_k_logits,
            top_k_weights=top_k_weights,
            non_finite_ops=non_finite_ops,
            forward_ns=forward_ns,
            statistics_ns=statistics_ns,
            paths=self._paths.count(step),
        )

    def draft(
        self, rows: Sequence[GreedyRow], block_tables: Int32, num_ids: int
    ) -> tuple[int, int]:
        """Computes greedy passes without going back to Python (see `greedy.Draft`).

        Raises:
            ValueError: a row is malformed; nothing was written.
        """
        nanoseconds, passes, drafted = self._open_engine().draft(
            [row.token_ids for row in rows],
            [row.start_position for row in rows],
            [row.max_drafts for row in rows],
            [row.min_confidence for row in rows],
            block_tables,
            num_ids,
        )
        for row, came in zip(rows, drafted, strict=True):
            row.drafts, row.confidences, row.num_passes, row.is_finite = came
        return nanoseconds, passes

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        self._open_engine().zero_blocks(np.ascontiguousarray(block_ids, dtype=np.int32))

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        out = np.empty(block_shape(self._dimensions, self._limits.block_size), dtype=np.uint16)
        self._open_engine().read_block(block_id, out.reshape(-1))
        return out

    def choices(self, num_rows: int) -> Sequence[str]:
        """Names of the ways in which a step of so many rows can run (`tuning.Tunable`)."""
        return panel_choices(num_rows, self._unit)

    def choose(self, choices: Mapping[int, str]) -> None:
        """Uses these ways from now on (`tuning.Tunable`)."""
        self._open_engine().set_panel_limits(panel_limits(choices))

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read_block` back; raises ValueError for another shape or block."""
        check_block(bits, block_shape(self._dimensions, self._limits.block_size))
        self._open_engine().write_block(block_id, np.ascontiguousarray(bits).reshape(-1))

    def set_flush_subnormals(self, flush: bool) -> None:
        """Makes all threads flush subnormal numbers (for tests: no result may change)."""
        self._open_engine().set_flush_subnormals(flush)

    def close(self) -> None:
        """Stops threads and frees memory, once no result's arrays are in use any more."""
        self._engine = None

    def _open_engine(self) -> _cpu.Engine:
        if self._engine is None:
            raise ValueError("[cpu_backend] the backend must be open, got a closed one")
        return self._engine


def _contiguous(step: StepInput) -> Iterator[npt.NDArray[np.generic]]:
    """A step's arrays in the order and types of the native call."""
    for array, dtype in (
        (step.token_ids, np.int32),
        (step.positions, np.int32),
        (step.query_start_loc, np.int32),
        (step.block_tables, np.int32),
        (step.wanted, np.int32),
        (step.statistics, np.uint32),
        (step.top_k, np.int32),
        (step.inverse_temperatures, np.float32),
        (step.quantiles, np.float32),
        (step.edit_starts, np.int32),
        (step.edit_ids, np.int32),
        (step.edit_values, np.float32),
    ):
        yield np.ascontiguousarray(array, dtype=dtype)


class _Builder:
    """Adds a program's buffers, weights and ops to an engine."""

    def __init__(self, engine: _cpu.Engine, program: Program) -> None:
        self._engine = engine
        self._program = program
        self._buffers: dict[str, tuple[int, Buffer]] = {}
        # By the weights' identity and sub-block: a tied embedding is repacked once.
        self._packed: dict[tuple[object, ...], int] = {}

    def build(self) -> None:
        for buffer in self._program.buffers:
            index = self._engine.add_buffer(buffer.width, buffer.activation_block, buffer.half_sums)
            self._buffers[buffer.name] = (index, buffer)
        # Linear layers first decide how shared weights are cut.
        linears = {
            i: self._linear_weights(op)
            for i, op in enumerate(self._program.ops)
            if isinstance(op, Linear)
        }
        for i, op in enumerate(self._program.ops):
            self._add(op, linears.get(i, ()))

    def _index(self, name: str) -> int:
        if name not in self._buffers:
            raise ValueError(f"[program] ops must name known buffers, got {name!r}")
        return self._buffers[name][0]

    def _add(self, op: Op, weights: Sequence[int]) -> None:
        add, at = self._engine.add_op, self._index
        match op:
            case Embed():
                add("embed", out=at(op.out), weights=[self._embedding(op.weight)])
            case NormQuantize():
                add(
                    "norm_quantize",
                    x=at(op.x),
                    out=at(op.out),
                    vector=_float32(op.weight),
                    epsilon=op.epsilon,
                    wanted_only=op.wanted_only,
                )
            case Quantize():
                add("quantize", x=at(op.x), out=at(op.out))
            case Linear():
                add(
                    "linear",
                    x=at(op.x),
                    out=at(op.out),
                    residual=-1 if op.residual is None else at(op.residual),
                    weights=weights,
                    vector=None if op.bias is None else _float32(op.bias),
                    wanted_only=op.wanted_only,
                    policy=op.policy,
                    threshold_rows=op.threshold_rows,
                )
            case RopeWriteKV():
                add("rope_write_kv", x=at(op.qkv), layer=op.layer)
            case PagedAttention():
                add(
                    "paged_attention",
                    x=at(op.qkv),
                    out=at(op.out),
                    layer=op.layer,
                    window=op.window,
                )
            case GateQuantize():
                add("gate_quantize", x=at(op.gate_up), out=at(op.out))
            case RowStatistics():
                add("row_statistics", x=at(op.logits))
            case AllGather() | Observe():
                add("nothing")

    def _linear_weights(self, op: Linear) -> list[int]:
        """Repacks a layer's weights; neighbours of one format become one matrix."""
        block = self._buffers[op.x][1].activation_block if op.x in self._buffers else 0
        if op.policy != EXACT:
            block = _FLOAT_BLOCK
        return [self._pack(tuple(group), block) for _, group in groupby(op.weights, key=_format)]

    def _embedding(self, weight: Weight) -> int:
        for block in (32, 64, 0):
            found = self._packed.get(_key((weight,), block))
            if found is not None:
                return found
        return self._pack((weight,), 32)

    def _pack(self, weights: tuple[Weight, ...], block: int) -> int:
        key = _key(weights, block)
        if key not in self._packed:
            self._packed[key] = _add_weights(self._engine, weights, block)
        return self._packed[key]


def _add_weights(engine: _cpu.Engine, weights: Iterable[Weight], block: int) -> int:
    quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
    dense = [w for w in weights if isinstance(w, DenseWeight)]
    if quantized:
        first = quantized[0]
        if block == 0:
            raise ValueError("[linear] quantised weights need a quantised x, got fp32 rows")
        arrays = [
            (
                np.ascontiguousarray(w.packed, dtype=np.uint32),
                np.ascontiguousarray(w.scales),
                None if w.biases is None else np.ascontiguousarray(w.biases),
            )
            for w in quantized
        ]
        sub_block = min(first.group_size, block)
        return engine.add_quantized(arrays, first.bits, first.group_size, sub_block)
    values = [np.ascontiguousarray(w.values).view(np.uint16) for w in dense]
    return engine.add_dense(values, dense[0].dtype is DenseType.BFLOAT16)


def _format(weight: Weight) -> tuple[object, ...]:
    """What neighbours must share to be joined."""
    if isinstance(weight, QuantizedWeight):
        return (weight.bits, weight.group_size, weight.scales.dtype.str)
    return (weight.dtype,)


def _key(weights: tuple[Weight, ...], block: int) -> tuple[object, ...]:
    """Identity of a repacked matrix: its arrays and how it is cut (dense ones are not)."""
    first = weights[0]
    if isinstance(first, DenseWeight):
        return tuple(id(w) for w in weights)
    return (min(first.group_size, block), *(id(w) for w in weights))


def _float32(array: npt.NDArray[np.generic]) -> Float32:
    return np.ascontiguousarray(array, dtype=np.float32)
