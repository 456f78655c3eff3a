"""Launches the kernels: one method for each, with its grid, constants and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from isobatch_kernels.cuda.device import Argument, Blocks, Chip, Device, KernelKey
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.tuning import (
    SLICES,
    RowsShape,
    choose_rows,
    choose_share,
    choose_tiles,
    for_rows,
    rows_top,
    takes_rows,
)
from isobatch_kernels.cuda.weights import PackedDense, PackedWeight, WeightFormat

GROUP: Final = 256  # threads of a block, except where a method says otherwise
_FLOAT: Final = 4  # bytes
# A format, the most rows of a launch of linear_rows, and whether results are logits.
Choice = tuple[WeightFormat, int, bool]


@dataclass(frozen=True, slots=True)
class Rows:
    """fp32 rows on the device, side by side."""

    address: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Quantised rows on the device (quantize.cu)."""

    q: int
    ds: int
    ds_half: int  # 0 where half blocks have no sums
    rows: int
    width: int
    block: int

    @property
    def padded(self) -> int:
        """Rows of `ds`."""
        return -(-self.rows // 8) * 8

    @property
    def groups(self) -> int:
        """Thread blocks of a kernel whose warps make one block of a row each."""
        return -(-self.width // (8 * self.block))

    @property
    def constants(self) -> dict[str, int]:
        """What kernels that write it are compiled for."""
        return {"A": self.block, "HALVES": int(self.ds_half != 0)}


@dataclass(frozen=True, slots=True)
class Output:
    """Where a linear layer writes: columns of rows, with what is added to them."""

    address: int  # of the first column
    stride: int  # columns of a row
    bias: int = 0  # 0 for none
    residual: int = 0  # likewise; of the same stride


@dataclass(frozen=True, slots=True)
class AttentionArrays:
    """What attention needs to know of a step."""

    rows: int  # (T,) row of tables
    positions: int  # (T,)
    tables: int  # (S, width)
    singles: int  # (n,) tokens whose chunks are shared out
    single_positions: int  # (n,)
    single_rows: int  # (n,)
    begins: int  # (p,) first tokens of parts
    counts: int  # (p,)
    num_singles: int
    num_parts: int
    width: int
    chunks: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values."""

    keys: int
    values: int


@dataclass(slots=True)
class Launcher:
    """Runs kernels on a device, or collects which ones would be run."""

    device: Device
    scratch: Scratch
    num_heads: int
    num_kv_heads: int
    head_dim: int
    timed: dict[tuple[WeightFormat, int], RowsShape] = field(default_factory=dict)
    collected: list[KernelKey] | None = None  # where a list, nothing is launched
    chip: Chip = field(init=False)  # whose sizes launches follow
    _keys: dict[tuple[str, int, tuple[int, ...]], KernelKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Launches follow the device's own sizes."""
        self.chip = self.device.chip

    def run(
        self,
        name: str,
        blocks: Blocks,
        arguments: Sequence[Argument],
        constants: dict[str, int] | None = None,
        threads: int = GROUP,
        shared_memory: int = 0,
        *,
        early: bool = True,
    ) -> None:
        """Runs a kernel on a grid of blocks."""
        known = (name, shared_memory, tuple(constants.values()) if constants else ())
        key = self._keys.get(known)
        if key is None:
            key = KernelKey(name, tuple((constants or {}).items()), shared_memory)
            self._keys[known] = key
        if self.collected is not None:
            self.collected.append(key)
            return
        self.device.launch(key, blocks, threads, arguments, early=early)

    # ------------------------------------------------------------------ activations

    def quantize(self, x: Rows, out: Activations, flags: int, op: int) -> None:
        """Rows of x (M, K) as 12-bit integers."""
        arguments = [x.address, out.q, out.ds, out.ds_half, flags, x.rows, x.width, op]
        self.run("quantize", (out.groups, x.rows, 1), arguments, out.constants)

    def gate_quantize(self, x: Rows, out: Activations, flags: int, op: int) -> None:
        """silu(gate)*up of x (M, 2*K), quantised."""
        arguments = [x.address, out.q, out.ds, out.ds_half, flags, x.rows, out.width, op]
        self.run("gate_quantize", (out.groups, x.rows, 1), arguments, out.constants)

    def gate(self, x: Rows, out: Rows) -> None:
        """silu(gate)*up of x (M, 2*K), fp32."""
        blocks = (-(-out.width // GROUP), x.rows, 1)
        self.run("gate", blocks, [x.address, out.address, out.width])

    def norm_quantize(
        self,
        x: Rows,
        weight: int,
        constants: tuple[float, float],
        rows: int,
        out: Activations,
        flags: int,
        op: int,
    ) -> None:
        """RMS norm of some rows of x (0: all), quantised; constants: fl(1/K), eps."""
        own = 32 if out.rows <= self.chip.multiprocessors else 8
        # All are collected, so that no step with other rows has to wait for a compiler.
        for warps in (own,) if self.collected is None else (8, 32):
            self.run(
                "norm_quantize",
                (1, out.rows, 1),
                [
                    *(x.address, weight, rows, out.q, out.ds, out.ds_half, flags),
                    *(out.rows, x.width, *constants, op),
                ],
                {**out.constants, "WARPS": warps},
                32 * warps,
            )

    def norm(
        self, x: Rows, weight: int, constants: tuple[float, float], rows: int, out: Rows
    ) -> None:
        """RMS norm of some rows of x (0: all), fp32."""
        arguments = [x.address, weight, rows, out.address, x.width, *constants]
        self.run("norm_rows", (1, out.rows, 1), arguments)

    # ------------------------------------------------------------------ weights

    def embed(self, weight: PackedWeight | PackedDense, ids: int, out: Rows) -> None:
        """Rows of an embedding, (T, K) fp32."""
        blocks = (-(-out.width // GROUP), out.rows, 1)
        arguments = [weight.address, ids, out.address, out.width]
        if isinstance(weight, PackedDense):
            self.run("embed_dense", blocks, arguments, {"BFLOAT": int(weight.is_bfloat)})
        else:
            self.run("embed", blocks, arguments, weight.constants)

    def linear(
        self, x: Activations, weight: PackedWeight, out: Output, *, logit: bool = False
    ) -> None:
        """x @ w.T, then + bias, then + residual: (M, N) fp32."""
        ds = x.ds if weight.sub_block == x.block else x.ds_half
        arguments = [
            *(weight.address, x.q, ds, out.bias, out.residual, out.address),
            *(x.rows, x.width, weight.num_outputs, out.stride, x.padded),
        ]
        constants = {**weight.constants}
        shape = None
        if takes_rows(x.rows, weight, self.chip):
            shape = self.rows_shape(x.rows, weight)
        if shape is not None:
            constants |= rows_constants(shape, logit=logit)
            arguments[6:6] = self.joined(shape, weight)
            memory = shape.shared_memory
            self.run("linear_rows", shape.blocks, arguments, constants, shape.threads, memory)
            return
        tiles = choose_tiles(x.rows, weight, self.chip)
        constants |= {"WT": tiles.warp_tiles, "RP": tiles.parts, "STAGES": tiles.stages}
        constants["LOGIT"] = int(logit)
        memory = tiles.shared_memory
        self.run("linear_tiles", tiles.blocks, arguments, constants, tiles.threads, memory)

    def rows_shape(self, rows: int, weight: PackedWeight) -> RowsShape | None:
        """The launch of linear_rows that was found fastest, or else is thought to be.

        None where rows are too long for shared memory.
        """
        timed = self.timed.get((weight.format, rows_top(rows)))
        if timed is not None:
            return for_rows(rows, weight, timed, self.chip)
        return choose_rows(rows, weight, self.chip)

    def joined(self, shape: RowsShape, weight: PackedWeight) -> tuple[int, int]:
        """Where warps of different blocks leave the sums of their slices, and count themselves."""
        if shape.is_joined or self.collected is not None:
            return 0, 0
        parts = shape.blocks[0] * -(-weight.tiles // shape.nt)
        size = parts * SLICES * shape.nt * shape.mt * 32 * 4 * _FLOAT
        return self.scratch.get("sums of slices", size), self.scratch.zeros("arrived", 4 * parts)

    def dense(
        self,
        x: Rows,
        prepared: tuple[int, int],
        weight: PackedDense,
        out: Output,
        flags: int,
        op: int,
        *,
        logit: bool = False,
    ) -> None:
        """As `linear`, for fp32 rows and a 16-bit matrix; `prepared`: room for (M, K) and (M,)."""
        bfloat = {"BFLOAT": int(weight.is_bfloat)}
        arguments = [x.address, *prepared, flags, x.width, op]
        self.run("prepare_dense", (x.rows, 1, 1), arguments, bfloat)
        self.run(
            "dense",
            (weight.tiles, -(-x.rows // 4), 1),
            [
                *(weight.address, *prepared, out.bias, out.residual, out.address),
                *(x.rows, x.width, weight.num_outputs, out.stride),
            ],
            {**bfloat, "LOGIT": int(logit)},
        )

    # ------------------------------------------------------------------ attention

    @property
    def _heads(self) -> dict[str, int]:
        return {"HEADS": self.num_heads, "KV_HEADS": self.num_kv_heads, "D": self.head_dim}

    def rope_write_kv(
        self,
        qkv: Rows,
        table: tuple[int, int],
        positions: int,
        blocks: int,
        cache: LayerCache,
        queries: int,
        scale: float,
        flags: int,
        op: int,
        *,
        interleaved: bool,
    ) -> None:
        """Queries (T, heads*D), roped and scaled; keys and values go to the cache.

        `table`: its address and half the rotary dimension; `blocks`: (T,) of the cache.
        """
        self.run(
            "rope_write_kv",
            (-(-qkv.width // GROUP), qkv.rows, 1),
            [
                *(qkv.address, table[0], positions, blocks, cache.keys, cache.values),
                *(queries, flags, table[1], scale, op),
            ],
            {**self._heads, "INTERLEAVED": int(interleaved)},
        )

    def attention_chunks(
        self, queries: int, step: AttentionArrays, cache: LayerCache, window: int, partials: int
    ) -> None:
        """Partial results of the chunks of the step's single tokens."""
        group = self.num_heads // self.num_kv_heads
        alone = step.chunks * self.num_kv_heads * step.num_singles
        share = choose_share(group, alone, self.chip)
        self.run(
            "attention_chunks",
            (step.chunks, self.num_kv_heads * -(-group // share), step.num_singles),
            [
                *(queries, step.singles, step.single_positions, step.single_rows, step.tables),
                *(cache.keys, cache.values, partials, step.width, window),
            ],
            {**self._heads, "SHARE": share},
            shared_memory=256 * self.head_dim * 2,
        )

    def merge_quantize(
        self,
        partials: int,
        step: AttentionArrays,
        window: int,
        out: Activations,
        flags: int,
        op: int,
    ) -> None:
        """Merges the chunks of all tokens and quantises; head_dim is a multiple of the block."""
        self.run(
            "attention_merge_quantize",
            (out.groups, out.rows, 1),
            [
                *(partials, step.positions, out.q, out.ds, out.ds_half, flags),
                *(step.chunks, window, op),
            ],
            {"HEADS": self.num_heads, "D": self.head_dim, **out.constants},
        )

    def attention(
        self,
        queries: int,
        partials: int,
        step: AttentionArrays,
        cache: LayerCache,
        window: int,
        out: int,
    ) -> None:
        """Attention of the step's parts, and the merge of its single tokens: (T, heads*D) fp32."""
        self.run(
            "attention_prefill",
            (self.num_heads, step.num_parts + step.num_singles, 1),
            [
                *(queries, step.begins, step.counts, step.rows, step.positions, step.tables),
                *(cache.keys, cache.values, partials, step.singles, out),
                *(step.num_parts, step.width, step.chunks, window),
            ],
            self._heads,
            shared_memory=8 * 8 * (self.head_dim + 256) * _FLOAT,
        )


def rows_constants(shape: RowsShape, *, logit: bool) -> dict[str, int]:
    """What linear_rows is compiled for, beside the weight's format."""
    return {
        "NT": shape.nt,
        "MT": shape.mt,
        "HELD": shape.held,
        "SLICES": shape.slices,
        "CLUSTER": shape.cluster,
        "TEAMS": shape.teams,
        "SETS": shape.sets,
        "DEEP": shape.deep,
        "STAGES": shape.stages,
        "RESIDENT": shape.resident,
        "LOGIT": int(logit),
    }
