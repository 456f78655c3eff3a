"""Translates a Program into launches, and a step into the arrays that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import mlx.core as mx
import numpy as np

from isobatch_kernels.cuda.launch import Activations, AttentionArrays, Launcher
from isobatch_kernels.cuda.weights import PackedDense, PackedWeight, pack_dense, pack_quantized
from isobatch_kernels.program import (
    AllGather,
    Buffer,
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

Value = mx.array | Activations
_NO_ROWS: Final = "[program] every op must name a known buffer"


@dataclass(slots=True)
class Run:
    """One step on its way through the launches."""

    attention: AttentionArrays
    token_ids: mx.array  # (T,)
    all_rows: mx.array  # (T,) 0, 1, 2, ..
    blocks: mx.array  # (T,) cache block of each token's position
    wanted: mx.array | None  # (L,) or None where nothing is wanted
    flags: mx.array  # (T + L,) of tokens, then of wanted positions
    buffers: dict[str, Value]

    def rows(self, name: str) -> mx.array:
        """An fp32 buffer."""
        value = self.buffers[name]
        if isinstance(value, Activations):
            raise ValueError(f"[program] buffer {name} must hold fp32 rows, got integers")
        return value


Stage = Callable[[Run], None]


class Stages:
    """A Program as launches, in order. Weights are packed at construction."""

    def __init__(self, program: Program, launcher: Launcher, table: mx.array, cache: mx.array):
        """Packs weights and vectors; `table` is the RoPE table, `cache` the key/value cache."""
        self._program = program
        self._launcher = launcher
        self._table = table
        self._cache = cache
        self._scale = mx.array([program.dimensions.attention_scale], dtype=mx.float32)
        self._buffers: dict[str, Buffer] = {b.name: b for b in program.buffers}
        # By the identity of their sources and their sub-block: a tied embedding is packed once.
        self._packed: dict[tuple[int, ...], PackedWeight | PackedDense] = {}
        self.logits = ""
        self._stages: list[tuple[bool, Stage]] = []
        linears = {
            i: self._linear_weights(op)
            for i, op in enumerate(program.ops)
            if isinstance(op, Linear)
        }
        skip = -1
        for i, op in enumerate(program.ops):
            if i == skip:
                continue
            following = program.ops[i + 1] if i + 1 < len(program.ops) else None
            if isinstance(op, PagedAttention) and self._fuses(op, following):
                assert isinstance(following, Quantize)
                self._stages.append((False, self._fused_attention(i + 1, op, following)))
                skip = i + 1
                continue
            wanted = isinstance(op, NormQuantize | Linear) and op.wanted_only
            stage = self._stage(i, op, linears.get(i, ()))
            if stage is not None:
                self._stages.append((wanted, stage))

    def run(self, run: Run) -> mx.array:
        """Runs every op but the statistics; gives an array behind the last op."""
        for wanted, stage in self._stages:
            if not wanted or run.wanted is not None:
                stage(run)
        if run.wanted is not None and self.logits:
            return run.rows(self.logits)
        return run.rows(self._residual())

    def _residual(self) -> str:
        for op in reversed(self._program.ops):
            if isinstance(op, Linear) and not op.wanted_only:
                return op.out
        raise ValueError("[program] some linear layer must work on every token, got none")

    def _buffer(self, name: str) -> Buffer:
        if name not in self._buffers:
            raise ValueError(f"{_NO_ROWS}, got {name!r}")
        return self._buffers[name]

    # ------------------------------------------------------------------ weights

    def _linear_weights(self, op: Linear) -> list[PackedWeight | PackedDense]:
        block = self._buffer(op.x).activation_block
        return [self._pack(tuple(same), block) for _, same in groupby(op.weights, key=_format)]

    def _pack(self, weights: tuple[Weight, ...], block: int) -> PackedWeight | PackedDense:
        quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
        if quantized and block == 0:
            raise ValueError("[linear] quantised weights need a quantised x, got fp32 rows")
        sub_block = min(quantized[0].group_size, block) if quantized else 0
        key = (sub_block, *(id(w) for w in weights))
        if key not in self._packed:
            if quantized:
                self._packed[key] = pack_quantized(quantized, sub_block)
            else:
                dense = [w for w in weights if isinstance(w, DenseWeight)]
                self._packed[key] = pack_dense(dense)
        return self._packed[key]

    def _embedding(self, weight: Weight) -> PackedWeight | PackedDense:
        for sub_block in (64, 32, 16, 0):
            found = self._packed.get((sub_block, id(weight)))
            if found is not None:
                return found
        return self._pack((weight,), 32)

    # ------------------------------------------------------------------ ops

    def _stage(
        self, index: int, op: Op, weights: Sequence[PackedWeight | PackedDense]
    ) -> Stage | None:
        launcher = self._launcher
        match op:
            case Embed():
                return self._embed(op)
            case NormQuantize():
                return self._norm(index, op)
            case Quantize():
                out = self._buffer(op.out)

                def quantize(run: Run) -> None:
                    run.buffers[op.out] = launcher.quantize(
                        run.rows(op.x), out.activation_block, out.half_sums, run.flags, index
                    )

                return quantize
            case Linear():
                return self._linear(index, op, weights)
            case RopeWriteKV():
                return self._rope(index, op)
            case PagedAttention():

                def attention(run: Run) -> None:
                    run.buffers[op.out] = self._attend(run, op)

                return attention
            case GateQuantize():
                return self._gate(index, op)
            case RowStatistics():
                self.logits = op.logits
                return None
            case AllGather() | Observe():
                return None

    def _embed(self, op: Embed) -> Stage:
        weight = self._embedding(op.weight)

        def embed(run: Run) -> None:
            run.buffers[op.out] = self._launcher.embed(weight, run.token_ids)

        return embed

    def _norm(self, index: int, op: NormQuantize) -> Stage:
        out, launcher = self._buffer(op.out), self._launcher
        weight = mx.array(np.ascontiguousarray(op.weight, dtype=np.float32))
        inverse = np.float32(1) / np.float32(len(op.weight))
        constants = mx.array(np.array([inverse, op.epsilon], dtype=np.float32))

        def norm(run: Run) -> None:
            rows = run.wanted if op.wanted_only and run.wanted is not None else run.all_rows
            x = run.rows(op.x)
            if out.activation_block == 0:
                run.buffers[op.out] = launcher.norm(x, weight, constants, rows)
                return
            block, halves = out.activation_block, out.half_sums
            run.buffers[op.out] = launcher.norm_quantize(
                x, weight, constants, rows, block, halves, run.flags, index
            )

        return norm

    def _linear(
        self, index: int, op: Linear, weights: Sequence[PackedWeight | PackedDense]
    ) -> Stage:
        if op.policy != "exact":
            raise ValueError(f"[linear] policy must be 'exact', got {op.policy!r}")
        launcher = self._launcher
        bias = None if op.bias is None else mx.array(np.asarray(op.bias, dtype=np.float32))
        begins = np.cumsum([0, *(w.num_outputs for w in weights)]).tolist()
        alone = len(weights) == 1

        def linear(run: Run) -> None:
            x = run.buffers[op.x]
            residual = None if op.residual is None else run.rows(op.residual)
            parts = []
            for weight, begin in zip(weights, begins, strict=False):
                end = begin + weight.num_outputs
                some_bias = bias if bias is None or alone else bias[begin:end]
                some_residual = residual
                if residual is not None and not alone:
                    some_residual = mx.contiguous(residual[:, begin:end])
                if isinstance(x, Activations) and isinstance(weight, PackedWeight):
                    y = launcher.linear(x, weight, some_bias, some_residual, logit=op.wanted_only)
                elif isinstance(x, mx.array) and isinstance(weight, PackedDense):
                    flags = run.flags[len(run.all_rows) :] if op.wanted_only else run.flags
                    y = launcher.dense(
                        x, weight, some_bias, some_residual, flags, index, logit=op.wanted_only
                    )
                else:
                    raise ValueError("[linear] weights and x must fit, got integers and fp32")
                parts.append(y)
            run.buffers[op.out] = parts[0] if alone else mx.concatenate(parts, axis=1)

        return linear

    def _rope(self, index: int, op: RopeWriteKV) -> Stage:
        interleaved = self._program.rope.interleaved

        def rope(run: Run) -> None:
            run.buffers[_queries(op.qkv)] = self._launcher.rope_write_kv(
                run.rows(op.qkv),
                self._table,
                run.attention.positions,
                run.blocks,
                self._cache,
                op.layer,
                self._scale,
                run.flags,
                index,
                interleaved=interleaved,
            )

        return rope

    def _gate(self, index: int, op: GateQuantize) -> Stage:
        out = self._buffer(op.out)

        def gate(run: Run) -> None:
            x = run.rows(op.gate_up)
            if out.activation_block == 0:
                run.buffers[op.out] = self._launcher.gate(x)
                return
            run.buffers[op.out] = self._launcher.gate_quantize(
                x, out.activation_block, out.half_sums, run.flags, index
            )

        return gate

    # ------------------------------------------------------------------ attention

    def _fuses(self, op: PagedAttention, following: Op | None) -> bool:
        """Whether the quantiser behind attention can be part of its merge."""
        if not isinstance(following, Quantize) or following.x != op.out:
            return False
        block = self._buffer(following.out).activation_block
        return self._program.dimensions.head_dim % block == 0

    def _attend(self, run: Run, op: PagedAttention) -> mx.array:
        launcher, step = self._launcher, run.attention
        queries = run.rows(_queries(op.qkv))
        partials = None
        if step.num_tokens:
            partials = launcher.attention_chunks(queries, step, self._cache, op.layer, op.window)
        return launcher.attention(queries, partials, step, self._cache, op.layer, op.window)

    def _fused_attention(self, index: int, op: PagedAttention, quantize: Quantize) -> Stage:
        launcher, out = self._launcher, self._buffer(quantize.out)
        block, halves = out.activation_block, out.half_sums

        def attention(run: Run) -> None:
            step = run.attention
            if step.num_tokens != len(run.all_rows):
                x = self._attend(run, op)
                run.buffers[op.out] = x
                run.buffers[quantize.out] = launcher.quantize(x, block, halves, run.flags, index)
                return
            queries = run.rows(_queries(op.qkv))
            partials = launcher.attention_chunks(queries, step, self._cache, op.layer, op.window)
            run.buffers[quantize.out] = launcher.merge_quantize(
                partials, step, op.window, block, halves, run.flags, index
            )

        return attention


def _queries(qkv: str) -> str:
    """Name of the roped queries of a qkv buffer."""
    return f"{qkv}.queries"


def _format(weight: Weight) -> tuple[Any, ...]:
    """What neighbours must share to be joined."""
    if isinstance(weight, QuantizedWeight):
        return (weight.bits, weight.group_size, str(weight.scales.dtype))
    return (weight.dtype,)
