"""Runs the ops of a Program for one step, stage by stage, on arrays of the device.

Everything here only enqueues: no value comes back to the host. A stage is the unit in which work
is handed to the device, so that it computes while the host describes the next stage.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal import attention as attn
from isobatch_kernels.metal import linear as lin
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

if TYPE_CHECKING:
    from isobatch_kernels.metal.arrays import LibraryArray
    from isobatch_kernels.metal.cache import BlockCopies, KeyValuePool
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.metal.model import DeviceModel
    from isobatch_kernels.metal.profile import MetalProfile
    from isobatch_kernels.program import Op, Program
    from isobatch_kernels.step import StepInput


@dataclass(slots=True)
class StepWork:
    """A step in work: its arrays on the device, and buffers by name."""

    step: StepInput
    ids: LibraryArray
    pool: KeyValuePool | BlockCopies
    all_rows: LibraryArray
    wanted_rows: LibraryArray
    attention: attn.AttentionStep
    cache_rows: LibraryArray
    buffers: dict[str, Any] = field(default_factory=dict)
    queries: dict[str, LibraryArray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.step.token_ids)

    @property
    def wanted(self) -> int:
        """L."""
        return len(self.step.wanted)

    def live(self) -> list[LibraryArray]:
        """Every array that later ops may read."""
        found: list[LibraryArray] = list(self.queries.values())
        for value in self.buffers.values():
            found += [value.q, value.d, value.s] if isinstance(value, act.Activations) else [value]
        return found


def stages(program: Program, layers_per_stage: int) -> list[range]:
    """Consecutive op indexes; a cut stands before the cache write of every n-th layer."""
    cuts, written = [0], 0
    for index, op in enumerate(program.ops):
        if isinstance(op, RopeWriteKV):
            if written and written % layers_per_stage == 0:
                cuts.append(index)
            written += 1
    cuts.append(len(program.ops))
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


class Forward:
    """The ops of one Program on one device."""

    def __init__(
        self,
        program: Program,
        launcher: Launcher,
        model: DeviceModel,
        rope_table: LibraryArray,
    ) -> None:
        """Keeps what every step needs."""
        self.program = program
        self.launcher = launcher
        self.model = model
        self._rope_table = rope_table

    def prepare(
        self,
        step: StepInput,
        ids: LibraryArray,
        pool: KeyValuePool | BlockCopies,
        profile: MetalProfile,
    ) -> StepWork:
        """Uploads what describes a step.

        Args:
            step: token rows and tables; its token ids are not looked at.
            ids: (T,) token ids on the device, at least 8.
            pool: where keys and values lie; block tables name its blocks.
            profile: choices of speed.
        """
        upload = self.launcher.upload
        tokens = len(step.token_ids)
        lengths = np.diff(step.query_start_loc)
        shape = attn.attention_shape(self.program.dimensions, int(lengths.max()))
        tiles = attn.token_tiles(step.query_start_loc, shape.token_tile)
        max_chunks = int(step.positions.max()) // attn.CHUNK + 1
        block_size = pool.layout.block_size
        token_rows = np.repeat(np.arange(len(lengths)), lengths)
        blocks = step.block_tables[token_rows, step.positions // block_size]
        return StepWork(
            step=step,
            ids=ids,
            pool=pool,
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
                split=profile.splits(
                    len(tiles) * shape.head_tiles, max_chunks, decodes=tokens == len(lengths)
                ),
            ),
            cache_rows=self.launcher.arrays.array(
                pool.layout.rows_of_positions(blocks, step.positions % block_size)
            ),
        )

    def run_op(self, index: int, work: StepWork, profile: MetalProfile) -> None:
        """Enqueues one op; row statistics are not among them."""
        op: Op = self.program.ops[index]
        if work.wanted == 0 and getattr(op, "wanted_only", False):
            return
        launcher, model, buffers = self.launcher, self.model, work.buffers
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
                buffers[op.out] = self._linear(index, op, work, profile)
            case RopeWriteKV():
                self._rope_write_kv(op, work)
            case PagedAttention():
                buffers[op.out] = attn.paged_attention(
                    launcher,
                    work.queries[op.qkv],
                    work.pool.layer(op.layer),
                    work.pool.layout,
                    work.attention,
                    op.window,
                )
            case AllGather() | Observe() | RowStatistics():
                pass

    def _embed(self, index: int, work: StepWork) -> LibraryArray:
        embedding = self.model.embeddings[index]
        if embedding.quantized is not None:
            return lin.embed(self.launcher, embedding.quantized, work.ids, work.tokens)
        values, width = embedding.dense_values, embedding.width
        return lin.embed_dense(self.launcher, values, width, work.ids, work.tokens)

    def _linear(
        self, index: int, op: Linear, work: StepWork, profile: MetalProfile
    ) -> LibraryArray:
        layer, x = self.model.linears[index], work.buffers[op.x]
        arrays = self.launcher.arrays
        residual = None if op.residual is None else work.buffers[op.residual]
        outputs, begin = [], 0
        for part, bias, width in zip(layer.parts, layer.biases, layer.widths, strict=True):
            own = residual
            if residual is not None and len(layer.parts) > 1:
                own = arrays.columns(residual, begin, begin + width)
            begin += width
            epilogue = lin.Epilogue(bias, own, op.wanted_only)
            if isinstance(part, lin.DeviceWeight):
                path, tile = profile.linear.choose(x.rows, part.shape)
                outputs.append(lin.quantized_linear(self.launcher, path, tile, x, part, epilogue))
            else:
                rows = work.wanted if op.wanted_only else work.tokens
                outputs.append(lin.dense_linear(self.launcher, x, rows, part, epilogue))
        return outputs[0] if len(outputs) == 1 else arrays.join_columns(outputs)

    def _rope_write_kv(self, op: RopeWriteKV, work: StepWork) -> None:
        rope = self.program.rope
        work.queries[op.qkv], values = attn.rope_write_kv(
            self.launcher,
            work.buffers[op.qkv],
            work.attention.positions,
            self._rope_table,
            work.tokens,
            self.program.dimensions,
            rope.rotary_dim,
            rope.interleaved,
            work.pool.layout,
        )
        work.pool.write(op.layer, work.cache_rows, values)
