"""Translates a Program into launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np

from isobatch_kernels.cuda.launch import (
    Activations,
    AttentionArrays,
    Launcher,
    LayerCache,
    Output,
    Rows,
)
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.timing import LinearUse
from isobatch_kernels.cuda.weights import (
    PackedDense,
    PackedWeight,
    WeightFormat,
    pack_dense,
    pack_quantized,
)
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

_NO_ROWS: Final = "[program] every op must name a known buffer"
_HALF, _WORD = 2, 4  # bytes


@dataclass(slots=True)
class Run:
    """One step on its way through the launches. Addresses are 0 for what is not there."""

    tokens: int
    wanted: int
    attention: AttentionArrays
    token_ids: int  # (T,)
    blocks: int  # (T,) cache block of each token's position
    wanted_tokens: int  # (L,)
    flags: int  # (T + L,) of tokens, then of wanted positions
    logits: int  # where they are written


Stage = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Resident:
    """What stays on the device between steps."""

    table: int  # (positions, half, 2) cosines and sines
    half: int  # half the rotary dimension
    caches: tuple[LayerCache, ...]


class Stages:
    """A Program as launches, in order. Weights are packed at construction."""

    def __init__(
        self,
        program: Program,
        launcher: Launcher,
        scratch: Scratch,
        resident: Resident,
        most_tokens: int,
    ) -> None:
        """Packs weights and vectors; a step has at most `most_tokens` tokens."""
        self._program = program
        self._launcher = launcher
        self._scratch = scratch
        self._resident = resident
        self._most = -(-most_tokens // 8) * 8
        self._buffers: dict[str, Buffer] = {b.name: b for b in program.buffers}
        # By the identity of their sources and their sub-block: a tied embedding is packed once.
        self._packed: dict[tuple[int, ...], PackedWeight | PackedDense] = {}
        self._vectors: list[int] = []
        self.logits = ""
        self._stages: list[tuple[bool, Stage]] = []
        linears = {
            i: self._linear_weights(op)
            for i, op in enumerate(program.ops)
            if isinstance(op, Linear)
        }
        self._linears = [
            (op, linears[i]) for i, op in enumerate(program.ops) if isinstance(op, Linear)
        ]
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

    def run(self, run: Run) -> None:
        """Launches every op but the statistics."""
        for wanted, stage in self._stages:
            if not wanted or run.wanted:
                stage(run)

    def linear_uses(self) -> list[LinearUse]:
        """The quantised matrices of linear layers by their format."""
        found: dict[WeightFormat, list[PackedWeight]] = {}
        logits: dict[WeightFormat, bool] = {}
        for op, weights in self._linears:
            for weight in weights:
                if isinstance(weight, PackedWeight):
                    found.setdefault(weight.format, []).append(weight)
                    logits.setdefault(weight.format, op.wanted_only)
        return [LinearUse(tuple(found[form]), logits[form]) for form in found]

    def close(self) -> None:
        """Frees weights and vectors."""
        device = self._launcher.device
        for address in [*self._vectors, *(packed.address for packed in self._packed.values())]:
            device.free(address)
        self._packed.clear()
        self._vectors.clear()

    # ------------------------------------------------------------------ memory

    def _buffer(self, name: str) -> Buffer:
        if name not in self._buffers:
            raise ValueError(f"{_NO_ROWS}, got {name!r}")
        return self._buffers[name]

    def _rows(self, run: Run, name: str, *, wanted: bool = False) -> Rows:
        """An fp32 buffer."""
        buffer = self._buffer(name)
        if buffer.activation_block:
            raise ValueError(f"[program] buffer {name} must hold fp32 rows, got integers")
        count = run.wanted if wanted else run.tokens
        if name == self._logits_name():
            return Rows(run.logits, count, buffer.width)
        address = self._scratch.get(f"rows {name}", self._most * buffer.width * _WORD)
        return Rows(address, count, buffer.width)

    def _logits_name(self) -> str:
        last = self._program.ops[-1]
        return last.logits if isinstance(last, RowStatistics) else ""

    def _activations(self, run: Run, name: str, *, wanted: bool = False) -> Activations:
        """A quantised buffer."""
        buffer = self._buffer(name)
        width, block, get = buffer.width, buffer.activation_block, self._scratch.get
        halves = 0
        if buffer.half_sums:
            halves = get(f"half sums {name}", 2 * _WORD * self._most * -(-width // 16))
        return Activations(
            q=get(f"integers {name}", _HALF * self._most * width),
            ds=get(f"sums {name}", 2 * _WORD * self._most * -(-width // block)),
            ds_half=halves,
            rows=run.wanted if wanted else run.tokens,
            width=width,
            block=block,
        )

    def _queries(self, qkv: str) -> int:
        """Roped queries of a qkv buffer."""
        dims = self._program.dimensions
        size = self._most * dims.num_heads * dims.head_dim * _WORD
        return self._scratch.get(f"queries {qkv}", size)

    def _partials(self, step: AttentionArrays) -> int:
        dims = self._program.dimensions
        each = dims.num_heads * (dims.head_dim + 2) * _WORD
        return self._scratch.get("partials", step.num_singles * step.chunks * each)

    def _vector(self, values: Any) -> int:
        array = np.ascontiguousarray(values, dtype=np.float32)
        device = self._launcher.device
        address = device.allocate(array.nbytes)
        device.upload(address, array)
        self._vectors.append(address)
        return address

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
            device = self._launcher.device
            if quantized:
                self._packed[key] = pack_quantized(device, quantized, sub_block)
            else:
                dense = [w for w in weights if isinstance(w, DenseWeight)]
                self._packed[key] = pack_dense(device, dense)
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
        match op:
            case Embed():
                weight = self._embedding(op.weight)
                return lambda run: self._launcher.embed(
                    weight, run.token_ids, self._rows(run, op.out)
                )
            case NormQuantize():
                return self._norm(index, op)
            case Quantize():
                return lambda run: self._launcher.quantize(
                    self._rows(run, op.x), self._activations(run, op.out), run.flags, index
                )
            case Linear():
                return self._linear(index, op, weights)
            case RopeWriteKV():
                return self._rope(index, op)
            case PagedAttention():
                return lambda run: self._attend(run, op)
            case GateQuantize():
                return self._gate(index, op)
            case RowStatistics():
                self.logits = op.logits
                return None
            case AllGather() | Observe():
                return None

    def _norm(self, index: int, op: NormQuantize) -> Stage:
        weight = self._vector(op.weight)
        inverse = np.float32(1) / np.float32(len(op.weight))
        constants = (float(inverse), float(np.float32(op.epsilon)))
        is_integer = self._buffer(op.out).activation_block > 0

        def norm(run: Run) -> None:
            only = op.wanted_only and run.wanted > 0
            rows, x = run.wanted_tokens if only else 0, self._rows(run, op.x)
            if is_integer:
                out = self._activations(run, op.out, wanted=only)
                self._launcher.norm_quantize(x, weight, constants, rows, out, run.flags, index)
            else:
                fp32 = self._rows(run, op.out, wanted=only)
                self._launcher.norm(x, weight, constants, rows, fp32)

        return norm

    def _linear(
        self, index: int, op: Linear, weights: Sequence[PackedWeight | PackedDense]
    ) -> Stage:
        if op.policy != "exact":
            raise ValueError(f"[linear] policy must be 'exact', got {op.policy!r}")
        launcher, only = self._launcher, op.wanted_only
        bias = 0 if op.bias is None else self._vector(op.bias)
        begins = np.cumsum([0, *(w.num_outputs for w in weights)]).tolist()
        is_integer = self._buffer(op.x).activation_block > 0

        def prepared() -> tuple[int, int]:
            size = self._most * self._buffer(op.x).width * _WORD
            return self._scratch.get(f"scaled {op.x}", size), self._scratch.get(
                f"powers {op.x}", self._most * _WORD
            )

        def linear(run: Run) -> None:
            out = self._rows(run, op.out, wanted=only)
            residual = 0
            if op.residual is not None:
                residual = self._rows(run, op.residual, wanted=only).address
            for weight, begin in zip(weights, begins, strict=False):
                columns = Output(
                    address=out.address + begin * _WORD,
                    stride=out.width,
                    bias=bias + begin * _WORD if bias else 0,
                    residual=residual + begin * _WORD if residual else 0,
                )
                if is_integer and isinstance(weight, PackedWeight):
                    x = self._activations(run, op.x, wanted=only)
                    launcher.linear(x, weight, columns, logit=only)
                elif not is_integer and isinstance(weight, PackedDense):
                    rows = self._rows(run, op.x, wanted=only)
                    flags = run.flags + (run.tokens * _WORD if only else 0)
                    launcher.dense(rows, prepared(), weight, columns, flags, index, logit=only)
                else:
                    raise ValueError("[linear] weights and x must fit, got integers and fp32")

        return linear

    def _rope(self, index: int, op: RopeWriteKV) -> Stage:
        resident, scale = (
            self._resident,
            float(np.float32(self._program.dimensions.attention_scale)),
        )

        def rope(run: Run) -> None:
            self._launcher.rope_write_kv(
                self._rows(run, op.qkv),
                (resident.table, resident.half),
                run.attention.positions,
                run.blocks,
                resident.caches[op.layer],
                self._queries(op.qkv),
                scale,
                run.flags,
                index,
                interleaved=self._program.rope.interleaved,
            )

        return rope

    def _gate(self, index: int, op: GateQuantize) -> Stage:
        is_integer = self._buffer(op.out).activation_block > 0

        def gate(run: Run) -> None:
            x = self._rows(run, op.gate_up)
            if is_integer:
                out = self._activations(run, op.out)
                self._launcher.gate_quantize(x, out, run.flags, index)
            else:
                self._launcher.gate(x, self._rows(run, op.out))

        return gate

    # ------------------------------------------------------------------ attention

    def _fuses(self, op: PagedAttention, following: Op | None) -> bool:
        """Whether the quantiser behind attention can be part of its merge."""
        if not isinstance(following, Quantize) or following.x != op.out:
            return False
        block = self._buffer(following.out).activation_block
        return self._program.dimensions.head_dim % block == 0

    def _chunks(self, run: Run, op: PagedAttention) -> int:
        """Partial results of single tokens; 0 where there are none."""
        if not run.attention.num_singles:
            return 0
        partials = self._partials(run.attention)
        cache, queries = self._resident.caches[op.layer], self._queries(op.qkv)
        self._launcher.attention_chunks(queries, run.attention, cache, op.window, partials)
        return partials

    def _attend(self, run: Run, op: PagedAttention) -> None:
        partials, cache = self._chunks(run, op), self._resident.caches[op.layer]
        queries, out = self._queries(op.qkv), self._rows(run, op.out).address
        self._launcher.attention(queries, partials, run.attention, cache, op.window, out)

    def _fused_attention(self, index: int, op: PagedAttention, quantize: Quantize) -> Stage:
        def attention(run: Run) -> None:
            out = self._activations(run, quantize.out)
            if run.attention.num_parts:
                self._attend(run, op)
                self._launcher.quantize(self._rows(run, op.out), out, run.flags, index)
                return
            partials, step = self._chunks(run, op), run.attention
            self._launcher.merge_quantize(partials, step, op.window, out, run.flags, index)

        return attention


def _format(weight: Weight) -> tuple[Any, ...]:
    """What neighbours must share to be joined."""
    if isinstance(weight, QuantizedWeight):
        return (weight.bits, weight.group_size, str(weight.scales.dtype))
    return (weight.dtype,)
