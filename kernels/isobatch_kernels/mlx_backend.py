"""The float policies in plain MLX operations, on MLX's default device.

Linear layers are `mx.quantized_matmul` of rows rounded to fp16. Under policy `mlx` MLX chooses the
kernel: on GPUs by the rows of the step, by chip and by shape; on the CPU it has one. The other
policies force it (mlx_weights.py). Everything else treats each token row by itself. It exists to be
compared with, and is slow (docs/numerics.md section 8).
Statistics of logits come from the native module: sampling counts on the contract's bits there.
"""

from __future__ import annotations

import itertools
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from isobatch_kernels import _cpu
from isobatch_kernels.blocks import check_block
from isobatch_kernels.deferred_step import SubmitByRun
from isobatch_kernels.float_program import policy_of
from isobatch_kernels.kernel_policy import MLX, float_path
from isobatch_kernels.mlx_device import device_kind, device_name
from isobatch_kernels.mlx_weights import MlxMatrix
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import (
    AllGather,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Observe,
    Op,
    PagedAttention,
    Program,
    Quantize,
    RopeWriteKV,
    RowStatistics,
    Weight,
)
from isobatch_kernels.rope_table import build_rope_table, rope_digest
from isobatch_kernels.step import Stat, StepOutput
from isobatch_kernels.step_check import StepLimits, check_step

if TYPE_CHECKING:
    import numpy.typing as npt

    from isobatch_kernels.step import Float32, Int32, StepInput

UNIT: Final = "mlx"
_LARGEST_HALF: Final = 65504.0
_NON_FINITE: Final = 2.0**96


class _Step:
    """A step in work: its arrays on the device, and buffers by name."""

    def __init__(self, step: StepInput, block_size: int) -> None:
        self.input = step
        positions = step.positions
        lengths = np.diff(step.query_start_loc)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        self.ids = mx.array(step.token_ids)
        self.positions = mx.array(positions)
        self.wanted = mx.array(step.wanted)
        # Where each token's keys and values go.
        self.blocks = mx.array(step.block_tables[rows, positions // block_size])
        self.slots = mx.array(positions % block_size)
        self.buffers: dict[str, mx.array] = {}


class MlxBackend(SubmitByRun):
    """Runs one Program through MLX; implements `step.Backend`."""

    def __init__(self, program: Program, limits: StepLimits) -> None:
        """Copies the weights to MLX; the sources may be freed afterwards.

        Raises ValueError where MLX has no kernel for a weight's format.
        """
        dims = self._dims = program.dimensions
        self._limits = limits
        self._program = program
        table = build_rope_table(program.rope, dims.context_length)
        self._rope_digest = rope_digest(table, program.rope.rotary_dim)
        self._rope_table = mx.array(table)
        # The matrices by the identity of their weights: a tied embedding is kept once.
        matrices: dict[int, MlxMatrix] = {}

        def matrix(weight: Weight) -> MlxMatrix:
            return matrices.setdefault(id(weight), MlxMatrix(weight))

        self._matrices = {
            index: tuple(
                matrix(weight) for weight in ((op.weight,) if isinstance(op, Embed) else op.weights)
            )
            for index, op in enumerate(program.ops)
            if isinstance(op, Embed | Linear)
        }
        self._vectors = {
            index: mx.array(vector)
            for index, op in enumerate(program.ops)
            for vector in [_vector_of(op)]
            if vector is not None
        }
        shape = (limits.num_blocks, dims.num_kv_heads, limits.block_size, dims.head_dim)
        self._keys = [mx.zeros(shape, mx.float16) for _ in range(dims.num_layers)]
        self._values = [mx.zeros(shape, mx.float16) for _ in range(dims.num_layers)]
        self._row_ops = _cpu.RowOps(_cpu.row_ops_names()[-1])
        self._paths = PathCounter(program, UNIT)
        mx.eval(self._keys, self._values, self._rope_table)

    @property
    def unit(self) -> str:
        """What runs: MLX, on whatever device it prefers."""
        return UNIT

    @property
    def class_detail(self) -> str:
        """What else the numeric class depends on: MLX's version and the kind of its device.

        It names MLX, because the CPU has native kernels under the same names.
        """
        detail = f"{version('mlx')}-{device_kind()}"
        return detail if policy_of(self._program) == MLX else f"mlx-{detail}"

    @property
    def device_name(self) -> str:
        """MLX's device in words; empty where MLX does not tell."""
        return device_name()

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        return self._rope_digest

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step. Raises ValueError for a malformed step, before anything is written."""
        check_step(step, self._limits)
        start = time.perf_counter_ns()
        state = _Step(step, self._limits.block_size)
        written: dict[str, int] = {}  # by buffer: the first op that wrote it
        logits_of = ""
        for index, op in enumerate(self._program.ops):
            if isinstance(op, RowStatistics):
                logits_of = op.logits
                continue
            if len(step.wanted) == 0 and getattr(op, "wanted_only", False):
                continue
            self._compute(index, op, state)
            out = getattr(op, "out", None)
            if out is not None:
                written.setdefault(out, index)
        mx.eval(state.buffers, self._keys, self._values)
        logits = np.zeros((0, self._dims.vocab_size), np.float32)
        if len(step.wanted):
            logits = np.array(state.buffers[logits_of], np.float32, order="C")
        bad_ops = self._non_finite_ops(state, written)
        forward_end = time.perf_counter_ns()
        return self._output(step, logits, bad_ops, start, forward_end)

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        ids = mx.array(np.asarray(block_ids, np.int32))
        for pages in (*self._keys, *self._values):
            pages[ids] = 0

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        pairs = [mx.stack([k[block_id], v[block_id]]) for k, v in self._pages()]
        return np.array(mx.stack(pairs)).view(np.uint16)

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read_block` back; raises ValueError for another shape or block."""
        pages = self._keys[0].shape
        check_block(bits, (len(self._keys), 2, *pages[1:]))
        if not 0 <= block_id < pages[0]:
            raise ValueError(f"[mlx_backend] block ids must lie in the pool, got {block_id}")
        contents = mx.array(np.ascontiguousarray(bits).view(np.float16))
        for layer, (keys, values) in enumerate(self._pages()):
            keys[block_id], values[block_id] = contents[layer, 0], contents[layer, 1]

    def close(self) -> None:
        """Lets the arrays go."""
        self._keys, self._values, self._matrices = [], [], {}

    def _pages(self) -> Any:
        return zip(self._keys, self._values, strict=True)

    def _compute(self, index: int, op: Op, state: _Step) -> None:
        buffers = state.buffers
        match op:
            case Embed():
                buffers[op.out] = self._matrices[index][0].rows(state.ids)
            case NormQuantize():
                x = buffers[op.x]
                if op.wanted_only:
                    x = x[state.wanted]
                buffers[op.out] = mx.fast.rms_norm(x, self._vectors[index], op.epsilon)
            case Linear():
                x = mx.clip(buffers[op.x], -_LARGEST_HALF, _LARGEST_HALF)
                path = float_path(op.policy, op.threshold_rows, x.shape[0])
                parts = [each.product(x, path) for each in self._matrices[index]]
                y = mx.concatenate(parts, axis=-1)
                if index in self._vectors:
                    y = y + self._vectors[index]
                if op.residual is not None:
                    y = y + buffers[op.residual]
                buffers[op.out] = y
            case RopeWriteKV():
                self._rope_write_kv(op, state)
            case PagedAttention():
                buffers[op.out] = self._attention(op, state)
            case GateQuantize():
                gate, up = mx.split(buffers[op.gate_up], 2, axis=-1)
                buffers[op.out] = gate * mx.sigmoid(gate) * up
            case AllGather() | Observe():
                pass
            case Quantize() | RowStatistics():
                raise ValueError(f"[mlx] a float program must not quantise, got {op}")

    def _rope_write_kv(self, op: RopeWriteKV, state: _Step) -> None:
        dims = self._dims
        heads, kv_heads = dims.num_heads, dims.num_kv_heads
        qkv = state.buffers[op.qkv].reshape(len(state.input.token_ids), -1, dims.head_dim)
        turned = self._rope(qkv[:, : heads + kv_heads], state.positions)
        state.buffers[op.qkv] = turned[:, :heads] * dims.attention_scale
        keys, values = self._keys[op.layer], self._values[op.layer]
        for pages, rows in ((keys, turned[:, heads:]), (values, qkv[:, heads + kv_heads :])):
            rows = mx.clip(rows, -_LARGEST_HALF, _LARGEST_HALF).astype(mx.float16)
            pages[state.blocks, :, state.slots] = rows

    def _rope(self, x: mx.array, positions: mx.array) -> mx.array:
        """(tokens, heads, head_dim), turned."""
        rope = self._program.rope
        turning, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
        table = self._rope_table[positions][:, None]
        cos, sin = table[..., 0], table[..., 1]
        if rope.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = mx.split(turning, 2, axis=-1)
        pair = [first * cos - second * sin, first * sin + second * cos]
        if rope.interleaved:
            turned = mx.stack(pair, axis=-1).reshape(turning.shape)
        else:
            turned = mx.concatenate(pair, axis=-1)
        return mx.concatenate([turned, rest], axis=-1)

    def _attention(self, op: PagedAttention, state: _Step) -> mx.array:
        """Each sequence in a call of its own, which sees nobody else."""
        step, dims = state.input, self._dims
        starts, size = step.query_start_loc.tolist(), self._limits.block_size
        keys, values = self._keys[op.layer], self._values[op.layer]
        outputs = []
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            length = int(step.positions[end - 1]) + 1
            table = mx.array(step.block_tables[row, : -(-length // size)])

            def cached(pages: mx.array, table: mx.array = table, length: int = length) -> mx.array:
                rows = pages[table].swapaxes(0, 1).reshape(dims.num_kv_heads, -1, dims.head_dim)
                return rows[None, :, :length].astype(mx.float32)

            q = state.buffers[op.qkv][begin:end].swapaxes(0, 1)[None]
            at = mx.arange(length - (end - begin), length)[:, None]
            key_at = mx.arange(length)[None]
            mask = key_at <= at
            if op.window:
                mask = mask & (key_at > at - op.window)
            out = mx.fast.scaled_dot_product_attention(
                q, cached(keys), cached(values), scale=1.0, mask=mask
            )
            outputs.append(out[0].swapaxes(0, 1).reshape(end - begin, -1))
        return mx.concatenate(outputs)

    def _non_finite_ops(self, state: _Step, written: dict[str, int]) -> Int32:
        """By row: the first op whose buffer is not finite at the end of the step, else -1."""
        step = state.input
        tokens = np.full(len(step.token_ids), len(self._program.ops), np.int32)
        for name, index in written.items():
            x = state.buffers[name]
            good = mx.all(mx.abs(x.reshape(x.shape[0], -1)) < _NON_FINITE, axis=-1)
            bad = np.flatnonzero(~np.array(good)).astype(np.int32)
            if x.shape[0] != len(step.token_ids):
                bad = step.wanted[bad]
            tokens[bad] = np.minimum(tokens[bad], index)
        first = np.minimum.reduceat(tokens, step.query_start_loc[:-1])
        return np.where(first < len(self._program.ops), first, -1).astype(np.int32)

    def _output(
        self, step: StepInput, logits: Float32, bad_ops: Int32, start: int, forward_end: int
    ) -> StepOutput:
        count = len(step.wanted)
        starts = np.zeros(count + 1, np.int32)
        np.cumsum(np.where((step.statistics & int(Stat.TOP_K)) != 0, step.top_k, 0), out=starts[1:])
        scalars = np.zeros((count, 4), np.float64)
        top_ids = np.zeros(starts[-1], np.int32)
        top_logits, top_weights = (np.zeros(starts[-1], np.float32) for _ in range(2))
        for i in range(count):
            bits = int(step.statistics[i])
            top, edits = slice(*starts[i : i + 2]), slice(*step.edit_starts[i : i + 2])
            scalars[i] = self._row_ops.statistics(
                logits[i],
                bool(bits & Stat.NORMALIZER),
                bool(bits & Stat.QUANTILE),
                float(step.inverse_temperatures[i]),
                float(step.quantiles[i]),
                # Copies, because the binding takes no read-only arrays, which messages give.
                step.edit_ids[edits].copy(),
                step.edit_values[edits].copy(),
                top_ids[top],
                top_logits[top],
                top_weights[top],
            )
        has_normalizer = (step.statistics & int(Stat.NORMALIZER)) != 0
        has_quantile = (step.statistics & int(Stat.QUANTILE)) != 0
        return StepOutput(
            logits=logits,
            argmax_ids=scalars[:, 0].astype(np.int32),
            max_logits=scalars[:, 1].astype(np.float32),
            normalizers=np.where(has_normalizer, scalars[:, 2], 0).astype(np.float32),
            quantile_ids=np.where(has_quantile, scalars[:, 3], -1).astype(np.int32),
            top_k_starts=starts,
            top_k_ids=top_ids,
            top_k_logits=top_logits,
            top_k_weights=top_weights,
            non_finite_ops=bad_ops,
            forward_ns=forward_end - start,
            statistics_ns=time.perf_counter_ns() - forward_end,
            paths=self._paths.count(step),
        )


def _vector_of(op: Op) -> npt.NDArray[np.generic] | None:
    """The norm's weight or the linear layer's bias, as fp32."""
    vector = op.weight if isinstance(op, NormQuantize) else getattr(op, "bias", None)
    return None if vector is None else np.asarray(vector, np.float32)
