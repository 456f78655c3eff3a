"""The CUDA backend: a Program as launches on one NVIDIA GPU, recorded once for each step shape.

Results have the bits of every other backend: docs/numerics.md says why, docs/cuda.md what was
measured.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.cache import KERNELS, BlockCache
from isobatch_kernels.cuda.device import Device, KernelKey
from isobatch_kernels.cuda.graphs import Graphs
from isobatch_kernels.cuda.launch import AttentionArrays, Launcher, Rows
from isobatch_kernels.cuda.logits import DeviceLogits
from isobatch_kernels.cuda.program import Resident, Run, Stages
from isobatch_kernels.cuda.scratch import SLOTS, Scratch, power_of_two
from isobatch_kernels.cuda.statistics import launch_statistics, read_top_k, result_layout
from isobatch_kernels.cuda.step_arrays import LONG_ROW, PART, StepShape, describe, offsets
from isobatch_kernels.cuda.timing import RowsTimer
from isobatch_kernels.cuda.tuning import FEW_ROWS, MOST_ROWS, ROW_TOPS
from isobatch_kernels.deferred_step import MAX_PENDING_STEPS
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import Program, RowStatistics
from isobatch_kernels.rope_table import build_rope_table, rope_digest
from isobatch_kernels.step import Float32, Int32, PendingStep, Stat, StepInput, StepOutput
from isobatch_kernels.step_check import StepLimits, check_step

_NO_FLAG: Final = 0xFFFFFFFF
_LIMIT: Final = 2.0**96
_WORD: Final = 4  # bytes


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """Sizes of a CUDA backend."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(eq=False, slots=True)
class _Pending:
    """A step on the device; implements `step.PendingStep`."""

    backend: CudaBackend
    step: StepInput
    shape: StepShape
    slot: int
    number: int  # of steps so far
    words: Int32  # where the results arrive
    logits: int
    started: int  # ns

    @property
    def is_running(self) -> bool:
        """It was launched by `submit`."""
        return True

    def finish(self) -> StepOutput:
        """Waits for the results (see `step.PendingStep`)."""
        return self.backend.finish(self)


class CudaBackend:
    """Runs one Program on the GPU; implements `step.Backend`.

    Weights are packed on the device at construction; no source array is kept.
    """

    def __init__(
        self, program: Program, limits: CudaLimits, device: Device, *, timed: bool = False
    ) -> None:
        """Packs weights, allocates the cache and compiles kernels; `device` is closed with it.

        `timed`: tile sizes of linear layers are chosen by the clock.

        Raises:
            ValueError: a malformed program, or sizes that do not suit the kernels.
        """
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
        self._device = device
        device.enter()
        self._table = device.allocate(table.nbytes)
        device.upload(self._table, np.ascontiguousarray(table))
        self._scratch = Scratch(device)
        heads = dims.num_heads, dims.num_kv_heads, dims.head_dim
        self._launcher = Launcher(device, self._scratch, *heads)
        self._cache = BlockCache(
            self._launcher, self._scratch, dims, limits.num_blocks, limits.block_size
        )
        self._stages = Stages(
            program,
            self._launcher,
            self._scratch,
            Resident(self._table, rope.rotary_dim // 2, self._cache.layers),
            limits.max_num_batched_tokens,
        )
        self.graphs = Graphs(device)
        self._statistics_op = next(
            (i for i, op in enumerate(program.ops) if isinstance(op, RowStatistics)), -1
        )
        self._paths = PathCounter(program, "cuda")
        self._pending: deque[_Pending] = deque()
        self._steps = 0
        self._chosen = -1  # tokens of the last step submitted; -1 before the first
        self._is_open = True
        self.tested_cases = 0  # comparisons with the contract before this backend was made
        if timed:
            timer = RowsTimer(device, self._launcher, self._scratch)
            timer.choose(self._stages.linear_uses(), limits.max_num_batched_tokens)
        device.compile(self._kernels())

    @property
    def unit(self) -> str:
        """Device in use."""
        return "cuda"

    @property
    def device_name(self) -> str:
        """The GPU in words."""
        return self._device.name

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        return self._rope_digest

    # ------------------------------------------------------------------ steps

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed; nothing was written.
        """
        return self.submit(step).finish()

    def submit(self, step: StepInput) -> PendingStep:
        """Launches a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed, or two are pending; nothing was written.
        """
        self._open()
        if len(self._pending) == MAX_PENDING_STEPS:
            raise ValueError(
                f"[step] at most {MAX_PENDING_STEPS} steps may be pending, got one more"
            )
        check_step(step, self._checked)
        self._check_sources(step)
        started = time.monotonic_ns()
        shape, numbers = describe(step, self._limits.block_size)
        slot = self._steps % SLOTS
        self._steps += 1
        self._scratch.next_step()
        sent = self._both("sent", len(numbers), slot)
        words = self._both("received", result_layout(shape).end, slot)
        sent[: len(numbers)] = numbers
        logits = self._per_slot("logits", shape.wanted * self._dimensions.vocab_size)[slot]
        addresses = sent.ctypes.data, words.ctypes.data
        self._reserve(shape)
        self.graphs.run(
            (shape, slot),
            self._scratch.generation,
            lambda: self._launch(shape, slot, *addresses, logits),
        )
        self._device.mark(slot)
        self._chosen = shape.wanted
        pending = _Pending(self, step, shape, slot, self._steps, words, logits, started)
        self._pending.append(pending)
        return pending

    def finish(self, pending: PendingStep) -> StepOutput:
        """Waits for the oldest pending step; what `PendingStep.finish` calls."""
        if not self._pending or self._pending[0] is not pending:
            raise ValueError("[step] steps must be finished once and in order, got another one")
        self._open()
        step = self._pending.popleft()
        self._device.wait_for(step.slot)
        words = step.words[: result_layout(step.shape).end].copy()
        return self._output(step, words, time.monotonic_ns() - step.started)

    def _check_sources(self, step: StepInput) -> None:
        sources = step.token_sources
        if not len(sources):
            return
        if len(sources) != len(step.token_ids) or int(sources.max()) >= max(self._chosen, 0):
            raise ValueError(
                f"[step] token_sources must be one a token, below {max(self._chosen, 0)}, "
                f"got {sources[:8]}"
            )

    def _per_slot(self, name: str, words: int) -> list[int]:
        """Memory of both slots; all of it grows at once, so that no recording allocates."""
        size = power_of_two(words) * _WORD
        return [self._scratch.get(f"{name} {slot}", size) for slot in range(SLOTS)]

    def _both(self, name: str, words: int, slot: int) -> Int32:
        return [self._scratch.pinned(f"{name} {i}", words) for i in range(SLOTS)][slot]

    def _reserve(self, shape: StepShape) -> tuple[int, int, list[int]]:
        """Numbers and results on the device, and the chosen tokens of both slots."""
        numbers = self._scratch.get("numbers", power_of_two(offsets(shape)["end"]) * _WORD)
        results = self._scratch.get("results", power_of_two(result_layout(shape).end) * _WORD)
        return numbers, results, self._per_slot("chosen", max(shape.wanted, 1))

    def _launch(self, shape: StepShape, slot: int, sent: int, received: int, logits: int) -> None:
        launcher, begins = self._launcher, offsets(shape)
        numbers, results, chosen = self._reserve(shape)
        at = {name: numbers + _WORD * begin for name, begin in begins.items()}
        flags = shape.tokens + shape.wanted
        launcher.run(
            "begin_step",
            (-(-max(begins["end"], flags) // 256), 1, 1),
            [
                *(sent, chosen[1 - slot], numbers, results, begins["end"], flags, shape.tokens),
                begins["sources"] if shape.sourced else 0,
            ],
            early=False,
        )
        attention = AttentionArrays(
            rows=at["rows"],
            positions=at["positions"],
            tables=at["tables"],
            singles=at["singles"],
            single_positions=at["single_positions"],
            single_rows=at["single_rows"],
            begins=at["begins"],
            counts=at["counts"],
            num_singles=shape.singles,
            num_parts=shape.parts,
            width=shape.table_width,
            chunks=shape.chunks,
        )
        self._stages.run(
            Run(
                tokens=shape.tokens,
                wanted=shape.wanted,
                attention=attention,
                token_ids=at["token_ids"],
                blocks=at["blocks"],
                wanted_tokens=at["wanted"],
                flags=results,
                logits=logits,
            )
        )
        if shape.wanted and self._stages.logits:
            rows = Rows(logits, shape.wanted, self._dimensions.vocab_size)
            launch_statistics(launcher, self._scratch, rows, shape, at, results, chosen[slot])
        count = result_layout(shape).end
        launcher.run("collect", (-(-count // 256), 1, 1), [results, received, count])

    def _kernels(self) -> list[KernelKey]:
        """Kernels of the steps that are likely to come."""
        most = self._limits.max_num_batched_tokens
        decode = StepShape(1, 1, 1, 1, 0, 1, 1, 1, True, 1, False)
        shapes = [
            replace(decode, tokens=n, sequences=n, singles=n, wanted=n)
            for n in (*ROW_TOPS, FEW_ROWS + 1, MOST_ROWS + 1)
            if n <= most
        ]
        if most >= LONG_ROW:
            for n in (min(most, 2 * PART), most):
                parts = -(-n // PART)
                shapes.append(replace(decode, tokens=n, singles=0, parts=parts))
        collected: list[KernelKey] = []
        self._launcher.collected = collected
        for shape in shapes:
            self._launch(shape, 0, 0, 0, 0)
        self._launcher.collected = None
        return [*collected, *KERNELS]

    # ------------------------------------------------------------------ blocks

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        self._open()
        self._cache.zero(block_ids)

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Bits of a block: (num_layers, 2, num_kv_heads, block_size, head_dim) fp16."""
        self._open()
        return self._cache.read(block_id)

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts bits of `read_block` back; raises ValueError for another shape or block."""
        self._open()
        self._cache.write(block_id, bits)

    def close(self) -> None:
        """Frees memory; a second time is nothing."""
        if not self._is_open:
            return
        self._device.enter()
        self._is_open = False
        self._device.synchronize()
        self._pending.clear()
        self.graphs.clear()
        self._scratch.close()
        self._stages.close()
        self._cache.close()
        self._device.free(self._table)
        self._device.close()

    def _open(self) -> None:
        if not self._is_open:
            raise ValueError("[cuda_backend] the backend must be open, got a closed one")
        self._device.enter()

    # ------------------------------------------------------------------ results

    def _output(self, done: _Pending, words: Int32, forward_ns: int) -> StepOutput:
        step, layout = done.step, result_layout(done.shape)
        answers = words[layout.answers : layout.top].reshape(-1, 4)
        max_logits = answers[:, 1].copy().view(np.float32)
        asked = step.statistics
        top = read_top_k(step, words[layout.top :], done.shape.stride)
        normalizer, quantile = ((asked & bit) != 0 for bit in (Stat.NORMALIZER, Stat.QUANTILE))
        return StepOutput(
            logits=self._logits(done),
            argmax_ids=answers[:, 0].copy(),
            max_logits=max_logits,
            normalizers=np.where(normalizer, answers[:, 2].copy().view(np.float32), np.float32(0)),
            quantile_ids=np.where(quantile, answers[:, 3], np.int32(-1)),
            top_k_starts=top.starts,
            top_k_ids=top.ids,
            top_k_logits=top.logits,
            top_k_weights=top.weights,
            non_finite_ops=self._non_finite_ops(step, words[: layout.answers], max_logits),
            forward_ns=forward_ns,
            statistics_ns=0,
            paths=self._paths.count(step),
        )

    def _logits(self, done: _Pending) -> Float32:
        shape = (len(done.step.wanted), self._dimensions.vocab_size)

        def copy(values: Float32) -> None:
            self._open()
            if self._steps >= done.number + SLOTS:
                raise ValueError("[cuda] logits must be read before the next step, got later")
            self._device.download(done.logits, values)

        return cast("Float32", DeviceLogits(shape, copy))

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
