"""The CUDA backend: a Program as launches of `mx.fast.cuda_kernel`, on one NVIDIA GPU.

A backend belongs to the thread that made it (MLX streams do). Results have the bits of every other
backend: docs/numerics.md says why, docs/cuda.md what was measured.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from isobatch_kernels.blocks import block_shape, check_block
from isobatch_kernels.cuda.launch import Launcher
from isobatch_kernels.cuda.logits import DeviceLogits
from isobatch_kernels.cuda.program import Run, Stages
from isobatch_kernels.cuda.statistics import launch_statistics, read_top_k
from isobatch_kernels.cuda.step_arrays import StepShape, describe, views
from isobatch_kernels.deferred_step import SubmitByRun
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import Program, RowStatistics
from isobatch_kernels.rope_table import build_rope_table, rope_digest
from isobatch_kernels.step import Float32, Int32, Stat, StepInput, StepOutput
from isobatch_kernels.step_check import StepLimits, check_step

# MLX ends a graph after so many megabytes of inputs and counts a whole cache at every layer.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000000")

_KEPT_GRAPHS: Final = 64
_NO_FLAG: Final = 0xFFFFFFFF
_LIMIT: Final = 2.0**96
_MOST_REPEATING_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """Sizes of a CUDA backend."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def cuda_available() -> bool:
    """Whether this MLX has a CUDA device."""
    return bool(mx.cuda.is_available())


class CudaBackend(SubmitByRun):
    """Runs one Program on the GPU; implements `step.Backend`.

    Weights are packed on the device at construction; no source array is kept.
    """

    def __init__(self, program: Program, limits: CudaLimits) -> None:
        """Packs weights and allocates the cache.

        Raises:
            ValueError: no device, a malformed program, or sizes that do not suit the kernels.
        """
        if not cuda_available():
            raise ValueError("[cuda] backend cuda needs an NVIDIA GPU and MLX for CUDA, got none")
        dims, rope = program.dimensions, program.rope
        if dims.head_dim % 8 or dims.head_dim > 256:
            raise ValueError(
                f"[cuda] head_dim must be a multiple of 8 and at most 256, got {dims.head_dim}"
            )
        self._limits = limits
        self._dimensions = dims
        self._checked = StepLimits(
            vocab_size=dims.vocab_size,
            context_length=dims.context_length,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        table = build_rope_table(rope, dims.context_length)
        self._rope_digest = rope_digest(table, rope.rotary_dim)
        size = dims.num_kv_heads * limits.block_size * dims.head_dim
        self._cache: mx.array | None = mx.zeros(
            (dims.num_layers, 2, limits.num_blocks, size), dtype=mx.float16
        )
        device_table = mx.array(table)
        self._launcher = Launcher(dims.num_heads, dims.num_kv_heads, dims.head_dim)
        self._stages = Stages(program, self._launcher, device_table, self._cache)
        self._all_rows = mx.arange(limits.max_num_batched_tokens, dtype=mx.int32)
        mx.eval(self._cache, device_table, self._all_rows)
        self._statistics_op = next(
            (i for i, op in enumerate(program.ops) if isinstance(op, RowStatistics)), -1
        )
        self._graphs: OrderedDict[StepShape, Callable[[mx.array], list[mx.array]]] = OrderedDict()
        self._paths = PathCounter(program, "cuda")

    @property
    def unit(self) -> str:
        """Device in use."""
        return "cuda"

    @property
    def device_name(self) -> str:
        """The GPU in words."""
        return str(mx.device_info().get("device_name", ""))

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        return self._rope_digest

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed; nothing was written.
        """
        self._open_cache()
        check_step(step, self._checked)
        started = time.monotonic_ns()
        shape, numbers = describe(step, self._limits.block_size)
        results, *arrays = self._graph(shape)(mx.array(numbers))
        mx.eval(results, *arrays)
        words = np.array(results)
        done = time.monotonic_ns()
        return self._output(step, words, arrays, done - started)

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        cache = self._open_cache()
        count = len(block_ids)
        if count == 0:
            return
        ids = mx.array(np.ascontiguousarray(block_ids, dtype=np.int32))
        layers = 2 * self._dimensions.num_layers
        mx.eval(
            self._launcher.run(
                "zero_blocks", [cache, ids], [((count,), mx.int32)], (count, layers, 1)
            )
        )

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        dims, slots = self._dimensions, self._limits.block_size
        raw = np.array(self._open_cache()[:, :, block_id]).view(np.uint16)
        heads = (dims.num_layers, dims.num_kv_heads)
        keys = raw[:, 0].reshape(*heads, dims.head_dim // 8, slots, 8).transpose(0, 1, 3, 2, 4)
        values = raw[:, 1].reshape(*heads, slots, dims.head_dim)
        return np.stack([keys.reshape(values.shape), values], axis=1)

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read_block` back; raises ValueError for another shape or block."""
        dims, slots = self._dimensions, self._limits.block_size
        cache = self._open_cache()
        check_block(bits, block_shape(dims, slots))
        if not 0 <= block_id < self._limits.num_blocks:
            raise ValueError(f"[cuda] block ids must lie in the pool, got {block_id}")
        heads = (dims.num_layers, dims.num_kv_heads)
        keys = bits[:, 0].reshape(*heads, slots, dims.head_dim // 8, 8).transpose(0, 1, 3, 2, 4)
        values = bits[:, 1].reshape(keys.shape)
        layers = 2 * dims.num_layers
        own = np.stack([keys, values], axis=1).view(np.float16).reshape(layers, -1)
        block = mx.array(np.array([block_id], np.int32))
        mx.eval(
            self._launcher.run(
                "write_block", [cache, mx.array(own), block], [((1,), mx.int32)], (1, layers, 1)
            )
        )

    def close(self) -> None:
        """Frees memory, once no result's arrays are in use any more."""
        self._cache = None
        self._graphs.clear()
        del self._stages
        mx.clear_cache()

    def _open_cache(self) -> mx.array:
        if self._cache is None:
            raise ValueError("[cuda_backend] the backend must be open, got a closed one")
        return self._cache

    def _graph(self, shape: StepShape) -> Callable[[mx.array], list[mx.array]]:
        """The launches of a step; those of shapes that come again are traced once."""
        found = self._graphs.get(shape)
        if found is not None:
            self._graphs.move_to_end(shape)
            return found

        def launch(numbers: mx.array) -> list[mx.array]:
            return self._launch(shape, numbers)

        if not shape.repeats or shape.tokens > _MOST_REPEATING_TOKENS:
            return launch
        compiled: Callable[[mx.array], list[mx.array]] = mx.compile(launch)
        self._graphs[shape] = compiled
        if len(self._graphs) > _KEPT_GRAPHS:
            self._graphs.popitem(last=False)
        return compiled

    def _launch(self, shape: StepShape, numbers: mx.array) -> list[mx.array]:
        """Results for the host, then the logits and the top-K arrays where there are any."""
        launcher, wanted = self._launcher, shape.statistics.wanted
        parts = views(shape, numbers)
        count = shape.tokens + wanted
        flags = launcher.run(
            "begin_step",
            [launcher.number(count)],
            [((count,), mx.uint32)],
            (-(-count // 256), 1, 1),
        )[0]
        run = Run(
            attention=parts.attention,
            token_ids=parts.token_ids,
            all_rows=self._all_rows[: shape.tokens],
            blocks=parts.blocks,
            wanted=parts.wanted,
            flags=flags,
            buffers={},
        )
        last = self._stages.run(run)
        answers, arrays = launcher.number(1, 4), []
        if wanted and self._stages.logits:
            answers, top = launch_statistics(launcher, last, shape.statistics, parts.statistics)
            arrays = [last, *top]
        after = arrays[1] if len(arrays) > 1 else last
        results = launcher.run(
            "collect",
            [flags, answers, after],
            [((count + 4 * wanted,), mx.int32)],
            (1, 1, 1),
        )[0]
        return [results, *arrays]

    def _output(
        self, step: StepInput, words: Int32, arrays: list[mx.array], forward_ns: int
    ) -> StepOutput:
        tokens, wanted = len(step.token_ids), len(step.wanted)
        answers = words[tokens + wanted :].reshape(-1, 4)
        max_logits = answers[:, 1].copy().view(np.float32)
        asked = step.statistics
        top = read_top_k(step, arrays[1:])
        normalizer, quantile = ((asked & bit) != 0 for bit in (Stat.NORMALIZER, Stat.QUANTILE))
        logits = (
            cast("Float32", DeviceLogits(arrays[0]))
            if arrays
            else np.empty((0, self._dimensions.vocab_size), dtype=np.float32)
        )
        return StepOutput(
            logits=logits,
            argmax_ids=answers[:, 0].copy(),
            max_logits=max_logits,
            normalizers=np.where(normalizer, answers[:, 2].copy().view(np.float32), np.float32(0)),
            quantile_ids=np.where(quantile, answers[:, 3], np.int32(-1)),
            top_k_starts=top.starts,
            top_k_ids=top.ids,
            top_k_logits=top.logits,
            top_k_weights=top.weights,
            non_finite_ops=self._non_finite_ops(step, words[: tokens + wanted], max_logits),
            forward_ns=forward_ns,
            statistics_ns=0,
            paths=self._paths.count(step),
        )

    def _non_finite_ops(self, step: StepInput, words: Int32, max_logits: Float32) -> Int32:
        """The first op of each row that met a non-finite value; -1 for none."""
        tokens = len(step.token_ids)
        flags = words.view(np.uint32).astype(np.int64)
        by_token, by_wanted = flags[:tokens], flags[tokens:].copy()
        bad = ~(np.abs(max_logits) < _LIMIT)
        by_wanted[bad & (by_wanted == _NO_FLAG)] = self._statistics_op + 1
        np.minimum.at(by_token, step.wanted, by_wanted)
        first = np.minimum.reduceat(by_token, step.query_start_loc[:-1])
        return np.where(first == _NO_FLAG, -1, first - 1).astype(np.int32)
