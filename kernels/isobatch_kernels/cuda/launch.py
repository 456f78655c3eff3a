"""Launches the kernels: one method for each, with its grid, template and output shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from isobatch_kernels.cuda.source import included, load_kernels
from isobatch_kernels.cuda.tuning import choose_rows, choose_tiles
from isobatch_kernels.cuda.weights import PackedDense, PackedWeight

GROUP: Final = 256  # threads of a block, except where a method says otherwise
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Quantised rows on the device (quantize.cu)."""

    q: mx.array
    ds: mx.array
    ds_half: mx.array
    rows: int
    width: int
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArrays:
    """What attention needs to know of a step."""

    rows: mx.array  # (T,) row of tables
    positions: mx.array  # (T,)
    tables: mx.array  # (S, blocks)
    tokens: mx.array  # (n,) tokens whose chunks are shared out
    begins: mx.array  # (p,) first tokens of parts
    counts: mx.array  # (p,)
    num_tokens: int  # n, 0 where tokens is a stand-in
    chunks: int


@dataclass(slots=True)
class Launcher:
    """Makes kernels on first use and runs them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    _kernels: dict[tuple[str, int], Any] = field(default_factory=dict)
    _numbers: dict[Shape, mx.array] = field(default_factory=dict)
    dispatches: int = 0

    def number(self, *shape: int) -> mx.array:
        """An array whose shape tells a kernel a size, without memory of its own."""
        if shape not in self._numbers:
            array = mx.broadcast_to(mx.zeros((1,) * len(shape)), shape)
            mx.eval(array)
            self._numbers[shape] = array
        return self._numbers[shape]

    def run(
        self,
        name: str,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[Shape, mx.Dtype]],
        blocks: tuple[int, int, int],
        template: dict[str, int] | None = None,
        threads: int = GROUP,
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Runs a kernel on a grid of blocks."""
        key = (name, shared_memory)
        if key not in self._kernels:
            source = load_kernels()[name]
            text = included(source)
            self._kernels[key] = mx.fast.cuda_kernel(
                name=f"isobatch_{name}",
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                source=text.body,
                header=text.header,
                ensure_row_contiguous=False,
                shared_memory=shared_memory,
            )
        self.dispatches += 1
        result: list[mx.array] = self._kernels[key](
            inputs=list(inputs),
            template=list(template.items()) if template else None,
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return result

    # ------------------------------------------------------------------ activations

    def _activations(
        self,
        name: str,
        inputs: Sequence[mx.array],
        rows: int,
        width: int,
        block: int,
        halves: bool,
        groups: int,
        template: dict[str, int] | None = None,
    ) -> Activations:
        blocks, padded = -(-width // block), -(-rows // 8) * 8
        half_shape = (-(-width // 16), padded, 2) if halves else (1,)
        q, ds, ds_half = self.run(
            name,
            inputs,
            [
                ((rows, width), mx.float16),
                ((blocks, padded, 2), mx.float32),
                (half_shape, mx.float32),
            ],
            (groups, rows, 1),
            {**(template or {}), "A": block, "HALVES": int(halves)},
        )
        return Activations(q, ds, ds_half, rows, width, block)

    def quantize(
        self, x: mx.array, block: int, halves: bool, flags: mx.array, op: int
    ) -> Activations:
        """Rows of x (M, K) as 12-bit integers."""
        rows, width = x.shape
        inputs = [x, flags, self.number(op)]
        groups = -(-width // (8 * block))
        return self._activations("quantize", inputs, rows, width, block, halves, groups)

    def gate_quantize(
        self, x: mx.array, block: int, halves: bool, flags: mx.array, op: int
    ) -> Activations:
        """silu(gate)*up of x (M, 2*K), quantised."""
        rows, width = x.shape[0], x.shape[1] // 2
        inputs = [x.reshape(rows, 2, width), flags, self.number(op)]
        groups = -(-width // (8 * block))
        return self._activations("gate_quantize", inputs, rows, width, block, halves, groups)

    def gate(self, x: mx.array) -> mx.array:
        """silu(gate)*up of x (M, 2*K), fp32."""
        rows, width = x.shape[0], x.shape[1] // 2
        return self.run(
            "gate",
            [x.reshape(rows, 2, width)],
            [((rows, width), mx.float32)],
            (-(-width // GROUP), rows, 1),
        )[0]

    def norm_quantize(
        self,
        x: mx.array,
        weight: mx.array,
        constants: mx.array,
        rows: mx.array,
        block: int,
        halves: bool,
        flags: mx.array,
        op: int,
    ) -> Activations:
        """RMS norm of some rows of x, quantised; constants: fl(1/K), eps."""
        inputs = [x, weight, constants, rows, flags, self.number(op)]
        count, width = rows.shape[0], x.shape[1]
        return self._activations("norm_quantize", inputs, count, width, block, halves, 1)

    def norm(self, x: mx.array, weight: mx.array, constants: mx.array, rows: mx.array) -> mx.array:
        """RMS norm of some rows of x, fp32."""
        shape = (rows.shape[0], x.shape[1])
        inputs = [x, weight, constants, rows]
        return self.run("norm", inputs, [(shape, mx.float32)], (1, shape[0], 1))[0]

    # ------------------------------------------------------------------ weights

    def embed(self, weight: PackedWeight | PackedDense, ids: mx.array) -> mx.array:
        """Rows of an embedding, (T, K) fp32."""
        shape = (ids.shape[0], weight.num_inputs)
        blocks = (-(-shape[1] // GROUP), shape[0], 1)
        if isinstance(weight, PackedDense):
            inputs = [weight.values, ids]
            return self.run("embed_dense", inputs, [(shape, mx.float32)], blocks)[0]
        inputs = [weight.words, ids, self.number(weight.num_inputs)]
        return self.run("embed", inputs, [(shape, mx.float32)], blocks, _format(weight))[0]

    def linear(
        self,
        x: Activations,
        weight: PackedWeight,
        bias: mx.array | None,
        residual: mx.array | None,
        *,
        logit: bool = False,
    ) -> mx.array:
        """x @ w.T, then + bias, then + residual: (M, N) fp32."""
        shape = (x.rows, weight.num_outputs)
        inputs = [
            weight.words,
            x.q,
            x.ds if weight.sub_block == x.block else x.ds_half,
            self.number(shape[1]) if bias is None else bias,
            self.number(*shape) if residual is None else residual,
        ]
        template = {**_format(weight), "LOGIT": int(logit)}
        if x.rows <= 32:
            rows = choose_rows(x.rows, weight)
            return self.run(
                "linear_rows",
                inputs,
                [(shape, mx.float32)],
                rows.blocks,
                {
                    **template,
                    "NT": rows.nt,
                    "MT": rows.mt,
                    "HELD": rows.held,
                    "STAGES": rows.stages,
                },
                shared_memory=rows.shared_memory,
            )[0]
        tiles = choose_tiles(x.rows, weight)
        return self.run(
            "linear_tiles",
            inputs,
            [(shape, mx.float32)],
            tiles.blocks,
            {**template, "RP": tiles.parts, "STAGES": tiles.stages},
            threads=128 * tiles.parts,
            shared_memory=tiles.shared_memory,
        )[0]

    def dense(
        self,
        x: mx.array,
        weight: PackedDense,
        bias: mx.array | None,
        residual: mx.array | None,
        flags: mx.array,
        op: int,
        *,
        logit: bool = False,
    ) -> mx.array:
        """As `linear`, for fp32 rows and a 16-bit matrix."""
        rows, width = x.shape
        scaled, powers = self.run(
            "prepare_dense",
            [x, flags, self.number(op)],
            [((rows, width), mx.float32), ((rows,), mx.float32)],
            (rows, 1, 1),
            {"BFLOAT": int(weight.is_bfloat)},
        )
        shape = (rows, weight.num_outputs)
        inputs = [
            weight.values,
            scaled,
            powers,
            self.number(shape[1]) if bias is None else bias,
            self.number(*shape) if residual is None else residual,
        ]
        blocks = (weight.values.shape[0], -(-rows // 4), 1)
        template = {"LOGIT": int(logit)}
        return self.run("dense", inputs, [(shape, mx.float32)], blocks, template)[0]

    # ------------------------------------------------------------------ attention

    @property
    def _heads(self) -> dict[str, int]:
        return {"HEADS": self.num_heads, "KV_HEADS": self.num_kv_heads, "D": self.head_dim}

    def rope_write_kv(
        self,
        qkv: mx.array,
        table: mx.array,
        positions: mx.array,
        blocks: mx.array,
        cache: mx.array,
        layer: int,
        scale: mx.array,
        flags: mx.array,
        op: int,
        *,
        interleaved: bool,
    ) -> mx.array:
        """Queries (T, heads*D), roped and scaled; writes keys and values into the cache."""
        rows = qkv.shape[0]
        number = self.number(layer + 1)
        inputs = [qkv, table, positions, blocks, cache, number, scale, flags, self.number(op)]
        shape = (rows, self.num_heads * self.head_dim)
        groups = -(-qkv.shape[1] // GROUP)
        template = {**self._heads, "INTERLEAVED": int(interleaved)}
        blocks_of_rows = (groups, rows, 1)
        return self.run("rope_write_kv", inputs, [(shape, mx.float32)], blocks_of_rows, template)[0]

    def attention_chunks(
        self, queries: mx.array, step: AttentionArrays, cache: mx.array, layer: int, window: int
    ) -> mx.array:
        """Partial results of the chunks of the step's single tokens."""
        shape = (step.num_tokens, self.num_heads, step.chunks, self.head_dim + 2)
        number, limit = self.number(layer + 1), self.number(window + 1)
        inputs = [
            *(queries, step.tokens, step.rows, step.positions, step.tables),
            *(cache, number, limit),
        ]
        blocks = (step.chunks, self.num_kv_heads, step.num_tokens)
        return self.run(
            "attention_chunks",
            inputs,
            [(shape, mx.float32)],
            blocks,
            self._heads,
            threads=512,
            # At least what makes MLX raise the limit, which the kernel's own arrays need too.
            shared_memory=max(49152, 256 * self.head_dim * 2),
        )[0]

    def merge_quantize(
        self,
        partials: mx.array,
        step: AttentionArrays,
        window: int,
        block: int,
        halves: bool,
        flags: mx.array,
        op: int,
    ) -> Activations:
        """Merges the chunks of all tokens and quantises; head_dim is a multiple of the block."""
        rows, width = step.num_tokens, self.num_heads * self.head_dim
        limit = self.number(window + 1)
        inputs = [partials, step.tokens, step.positions, limit, flags, self.number(op)]
        template = {"HEADS": self.num_heads, "D": self.head_dim}
        groups = -(-width // (8 * block))
        return self._activations(
            "attention_merge_quantize", inputs, rows, width, block, halves, groups, template
        )

    def attention(
        self,
        queries: mx.array,
        partials: mx.array | None,
        step: AttentionArrays,
        cache: mx.array,
        layer: int,
        window: int,
    ) -> mx.array:
        """Attention of the step's parts, and the merge of its single tokens: (T, heads*D) fp32."""
        inputs = [
            *(queries, step.begins, step.counts, step.rows, step.positions, step.tables),
            *(cache, self.number(layer + 1), self.number(window + 1)),
            *(self.number(1, 1, 1) if partials is None else partials, step.tokens),
        ]
        blocks = (self.num_heads, step.counts.shape[0] + step.num_tokens, 1)
        return self.run(
            "attention_prefill",
            inputs,
            [(queries.shape, mx.float32)],
            blocks,
            self._heads,
            shared_memory=8 * 8 * (self.head_dim + 256) * 4,
        )[0]


def _format(weight: PackedWeight) -> dict[str, int]:
    return {"SB": weight.storage_bits, "B": weight.sub_block, "ST": weight.scale_type}
