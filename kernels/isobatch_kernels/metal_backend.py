"""The Metal backend: interprets a Program with the kernels of metal/ over a kernel factory.

On a Mac the factory is `mx.fast.metal_kernel` and arrays are MLX's. Both are parameters, so the
same code runs under the harness of tests/metal_on_cpu. Nothing here raises the wired-memory limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.deferred_step import SubmitByRun
from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal import attention as attn
from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal.cache import KeyValuePool, pool_layout
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.model import DeviceModel
from isobatch_kernels.metal.non_finite import find_first_ops, suspicious_buffers
from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal.statistics import RowResults, empty_results, row_statistics
from isobatch_kernels.metal.step_check import StepLimits, check_step, warm_up_step
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import (
    AllGather,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Observe,
    PagedAttention,
    Quantize,
    RopeWriteKV,
    RowStatistics,
)
from isobatch_kernels.rope_table import rope_digest
from isobatch_kernels.step import StepOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from isobatch_kernels.metal.arrays import ArrayLibrary, KernelFactory, LibraryArray
    from isobatch_kernels.program import Op, Program
    from isobatch_kernels.step import Float32, Int32, PathCount, StepInput


@dataclass(frozen=True, slots=True)
class MetalLimits:
    """Sizes of a Metal backend."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class _Step:
    """A step in work: its arrays on the device, and buffers by name."""

    step: StepInput
    ids: LibraryArray
    all_rows: LibraryArray
    wanted_rows: LibraryArray
    attention: attn.AttentionStep
    cache_rows: LibraryArray
    buffers: dict[str, Any]
    queries: dict[str, LibraryArray]
    results: RowResults | None = None

    @property
    def tokens(self) -> int:
        return len(self.step.token_ids)

    @property
    def wanted(self) -> int:
        return len(self.step.wanted)


class MetalBackend(SubmitByRun):
    """Runs one Program on a Metal device; implements `step.Backend`."""

    def __init__(
        self,
        program: Program,
        limits: MetalLimits,
        *,
        kernel_factory: KernelFactory,
        arrays: ArrayLibrary,
        rope_table: Float32,
        profile: MetalProfile | None = None,
    ) -> None:
        """Repacks the weights and moves them to the device; sources may be freed afterwards.

        Args:
            program: the model.
            limits: sizes of the cache and of a step.
            kernel_factory: `mx.fast.metal_kernel`, or a stand-in.
            arrays: the array library that the factory's kernels take.
            rope_table: (context_length, rotary_dim/2, 2) cos and sin, as rope_table.cpp makes it.
            profile: choices of speed.

        Raises:
            ValueError: the program is malformed, or has a head of more than 256 dimensions.
        """
        dims = program.dimensions
        self._open = True
        self._program = program
        self._limits = limits
        self._profile = profile or MetalProfile()
        self._arrays = arrays
        self._launcher = Launcher(kernel_factory, arrays)
        self._model = DeviceModel(arrays, program)
        self._pool = KeyValuePool(
            arrays, pool_layout(dims, limits.num_blocks, limits.block_size), dims.num_layers
        )
        attn.attention_shape(dims, 1)
        table = np.ascontiguousarray(rope_table, np.float32).reshape(-1)
        if table.size != dims.context_length * program.rope.rotary_dim:
            raise ValueError(
                f"[metal] the RoPE table must cover the context, got {table.size} values"
            )
        self._rope_digest = rope_digest(table, program.rope.rotary_dim)
        self._rope_table = self._launcher.upload(table)
        self._paths = PathCounter(program, self.unit)
        self._step_limits = StepLimits(
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            dims.vocab_size,
            dims.context_length,
            limits.num_blocks,
            limits.block_size,
        )

    @property
    def unit(self) -> str:
        """Device in use."""
        return "metal"

    @property
    def profile(self) -> MetalProfile:
        """Choices in use."""
        return self._profile

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        return self._rope_digest

    @property
    def dispatches(self) -> int:
        """Kernels launched so far."""
        return self._launcher.dispatches

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed, or the backend closed; nothing was written.
        """
        if not self._open:
            raise ValueError("[metal] the backend must be open, got a closed one")
        check_step(step, self._step_limits)
        begin = time.perf_counter_ns()
        work = self._prepare(step)
        for index, op in enumerate(self._program.ops):
            if not isinstance(op, RowStatistics):
                self._run_op(index, op, work)
        suspicious = suspicious_buffers(self._launcher, self._model, work.buffers, work.tokens)
        middle = time.perf_counter_ns()
        results = self._statistics(work)
        non_finite = np.full(len(step.query_start_loc) - 1, -1, np.int32)
        if suspicious or not (np.abs(results.max_logits) < 2.0**96).all():
            non_finite = self._diagnose(step, results)
        end = time.perf_counter_ns()
        return StepOutput(
            logits=results.logits,
            argmax_ids=results.argmax_ids,
            max_logits=results.max_logits,
            normalizers=results.normalizers,
            quantile_ids=results.quantile_ids,
            top_k_starts=results.top_k_starts,
            top_k_ids=results.top_k_ids,
            top_k_logits=results.top_k_logits,
            top_k_weights=results.top_k_weights,
            non_finite_ops=non_finite,
            forward_ns=middle - begin,
            statistics_ns=end - middle,
            paths=self._count_paths(work),
        )

    def warm_up(self) -> None:
        """Compiles what steps will need: every row tile, both forms of attention, statistics.

        Runs small steps over the first blocks and clears them, so call it before serving.
        """
        block_size = self._limits.block_size
        tiles = self._profile.linear.row_tiles
        most = min(self._limits.max_num_batched_tokens, self._program.dimensions.context_length)
        blocks = -(-most // block_size)
        for rows in sorted({*tiles, tiles[-1] + 1}):
            if rows <= most and rows <= self._limits.num_blocks * block_size:
                self.run(warm_up_step(0, rows, block_size))
        last = min(attn.CHUNK, self._program.dimensions.context_length - 1)
        # Its table names block 0 for every position: only the kernels matter.
        work = self._prepare(warm_up_step(last, 1, block_size, one_block=True))
        for index, op in enumerate(self._program.ops):
            if not isinstance(op, RowStatistics):
                self._run_op(index, op, work)
        self.zero_blocks(np.arange(min(blocks, self._limits.num_blocks), dtype=np.int32))

    def choices(self, num_rows: int) -> Sequence[str]:
        """Ways in which linear layers of so many rows can run (`tuning.Tunable`)."""
        return self._profile.linear.choices(num_rows)

    def choose(self, choices: Mapping[int, str]) -> None:
        """Uses these ways from now on (`tuning.Tunable`)."""
        self._profile = replace(self._profile, linear=self._profile.linear.tuned_by(choices))

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        self._pool.zero_blocks(np.asarray(block_ids, np.int32))

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        return self._pool.read_block(block_id)

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read_block` back; raises ValueError for another shape or block."""
        self._pool.write_block(block_id, bits)

    def close(self) -> None:
        """Lets go of weights and cache; nothing runs afterwards."""
        self._program = replace(self._program, buffers=(), ops=())
        self._model = DeviceModel(self._arrays, self._program)
        self._pool = KeyValuePool(self._arrays, self._pool.layout, 0)
        self._open = False

    # What follows is one step, in order.

    def _prepare(self, step: StepInput) -> _Step:
        upload = self._launcher.upload
        tokens = len(step.token_ids)
        lengths = np.diff(step.query_start_loc)
        shape = attn.attention_shape(self._program.dimensions, int(lengths.max()))
        tiles = attn.token_tiles(step.query_start_loc, shape.token_tile)
        max_chunks = int(step.positions.max()) // attn.CHUNK + 1
        groups = len(tiles) * shape.head_tiles
        split = self._profile.use_split and max_chunks > 1 and groups < self._profile.split_below
        token_rows = np.repeat(np.arange(len(lengths)), lengths)
        block_size = self._limits.block_size
        blocks = step.block_tables[token_rows, step.positions // block_size]
        return _Step(
            step=step,
            ids=upload(step.token_ids.astype(np.int32)),
            all_rows=upload(np.arange(tokens, dtype=np.int32)),
            wanted_rows=upload(step.wanted.astype(np.int32)),
            attention=attn.AttentionStep(
                shape=shape,
                tables=upload(step.block_tables.astype(np.int32)),
                positions=upload(step.positions.astype(np.int32)),
                tiles=upload(tiles),
                num_tiles=len(tiles),
                num_tokens=tokens,
                max_blocks=step.block_tables.shape[1],
                max_chunks=max_chunks,
                split=split,
            ),
            cache_rows=self._arrays.array(
                self._pool.layout.rows_of_positions(blocks, step.positions % block_size)
            ),
            buffers={},
            queries={},
        )

    def _run_op(self, index: int, op: Op, work: _Step) -> None:
        if work.wanted == 0 and getattr(op, "wanted_only", False):
            return
        launcher, model, buffers = self._launcher, self._model, work.buffers
        match op:
            case Embed():
                buffers[op.out] = self._embed(index, work)
            case NormQuantize():
                rows, count = work.all_rows, work.tokens
                if op.wanted_only:
                    rows, count = work.wanted_rows, work.wanted
                norm, layout = model.norms[index], model.layouts.get(op.out)
                buffers[op.out] = (
                    act.norm_rows(launcher, buffers[op.x], norm, rows, count)
                    if layout is None
                    else act.norm_quantize(launcher, buffers[op.x], norm, rows, count, layout)
                )
            case Quantize():
                layout = model.layouts[op.out]
                buffers[op.out] = act.quantize(launcher, buffers[op.x], work.tokens, layout)
            case GateQuantize():
                layout, gate_up = model.layouts.get(op.out), buffers[op.gate_up]
                buffers[op.out] = (
                    act.gate(launcher, gate_up, work.tokens, model.widths[op.out])
                    if layout is None
                    else act.gate_quantize(launcher, gate_up, work.tokens, layout)
                )
            case Linear():
                buffers[op.out] = self._linear(index, op, work)
            case RopeWriteKV():
                self._rope_write_kv(op, work)
            case PagedAttention():
                buffers[op.out] = attn.paged_attention(
                    launcher,
                    work.queries[op.qkv],
                    self._pool.layer(op.layer),
                    self._pool.layout,
                    work.attention,
                    op.window,
                )
            case AllGather() | Observe() | RowStatistics():
                pass

    def _embed(self, index: int, work: _Step) -> LibraryArray:
        embedding = self._model.embeddings[index]
        if embedding.quantized is not None:
            return lin.embed(self._launcher, embedding.quantized, work.ids, work.tokens)
        values, width = embedding.dense_values, embedding.width
        return lin.embed_dense(self._launcher, values, width, work.ids, work.tokens)

    def _linear(self, index: int, op: Linear, work: _Step) -> LibraryArray:
        layer, x = self._model.linears[index], work.buffers[op.x]
        residual = None if op.residual is None else work.buffers[op.residual]
        outputs, begin = [], 0
        for part, bias, width in zip(layer.parts, layer.biases, layer.widths, strict=True):
            own = residual
            if residual is not None and len(layer.parts) > 1:
                own = self._arrays.columns(residual, begin, begin + width)
            begin += width
            epilogue = lin.Epilogue(bias, own, op.wanted_only)
            if isinstance(part, lin.DeviceWeight):
                path, tile = self._profile.linear.choose(x.rows)
                outputs.append(lin.quantized_linear(self._launcher, path, tile, x, part, epilogue))
            else:
                rows = work.wanted if op.wanted_only else work.tokens
                outputs.append(lin.dense_linear(self._launcher, x, rows, part, epilogue))
        return outputs[0] if len(outputs) == 1 else self._arrays.join_columns(outputs)

    def _rope_write_kv(self, op: RopeWriteKV, work: _Step) -> None:
        rope = self._program.rope
        work.queries[op.qkv], values = attn.rope_write_kv(
            self._launcher,
            work.buffers[op.qkv],
            work.attention.positions,
            self._rope_table,
            work.tokens,
            self._program.dimensions,
            rope.rotary_dim,
            rope.interleaved,
            self._pool.layout,
        )
        self._pool.write(op.layer, work.cache_rows, values)

    def _statistics(self, work: _Step) -> RowResults:
        for op in self._program.ops:
            if isinstance(op, RowStatistics) and work.wanted:
                width = self._model.widths[op.logits]
                return row_statistics(self._launcher, work.buffers[op.logits], width, work.step)
        return empty_results(work.wanted)

    def _diagnose(self, step: StepInput, results: RowResults) -> Int32:
        """Runs the step once more, op by op, to name each row's first op: rare, so not kept fast.

        The same keys and values are written again.
        """
        work = self._prepare(step)

        def advance(index: int) -> dict[str, Any]:
            self._run_op(index, self._program.ops[index], work)
            return work.buffers

        return find_first_ops(
            self._program, self._model, self._arrays, step, results.max_logits, advance
        )

    def _count_paths(self, work: _Step) -> list[PathCount]:
        counts = []
        for count in self._paths.count(work.step):
            path = count.path
            if count.op == "linear":
                path = self._profile.linear.choose(count.rows)[0]
            elif count.op == "paged_attention":
                path = "attention_decode" if work.attention.split else "attention_prefill"
            counts.append(replace(count, path=path))
        return counts
