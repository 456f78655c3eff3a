"""The Metal backend: interprets a Program with the kernels of metal/ over a kernel factory.

On a Mac the factory is `mx.fast.metal_kernel` and arrays are MLX's. Both are parameters, so the
same code runs under the harness of tests/metal_on_cpu. Nothing here raises the wired-memory limit.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.deferred_step import MAX_PENDING_STEPS
from isobatch_kernels.metal import attention as attn
from isobatch_kernels.metal.cache import BlockCopies, KeyValuePool, pool_layout
from isobatch_kernels.metal.forward import Forward, stages
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.linear import DeviceWeight
from isobatch_kernels.metal.linear_profile import Choice, kernel_of
from isobatch_kernels.metal.measure import fastest_choice
from isobatch_kernels.metal.model import DeviceModel
from isobatch_kernels.metal.non_finite import Watched, find_first_ops, watch
from isobatch_kernels.metal.pending import SubmittedStep
from isobatch_kernels.metal.profile import MetalProfile
from isobatch_kernels.metal.statistics import (
    empty_results,
    read_statistics,
    row_statistics,
    take_tokens,
)
from isobatch_kernels.metal.step_check import StepLimits, check_step, warm_up_step
from isobatch_kernels.paths import PathCounter
from isobatch_kernels.program import Linear, RopeWriteKV, RowStatistics
from isobatch_kernels.rope_table import rope_digest
from isobatch_kernels.step import PathCount, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from isobatch_kernels.metal.arrays import ArrayLibrary, KernelFactory, LibraryArray
    from isobatch_kernels.metal.forward import StepWork
    from isobatch_kernels.metal.statistics import DeviceStatistics, RowResults
    from isobatch_kernels.program import Program
    from isobatch_kernels.step import Float32, Int32, StepInput


@dataclass(frozen=True, slots=True)
class MetalLimits:
    """Sizes of a Metal backend."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class MetalBackend:
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
        self._forward = Forward(program, self._launcher, self._model, self._launcher.upload(table))
        self._stages = stages(program, self._profile.layers_per_stage)
        self._pending: deque[SubmittedStep] = deque()
        self._chosen: DeviceStatistics | None = None  # of the step submitted last
        self._last_end_ns = 0
        self._paths = PathCounter(program, self.unit)
        self._linears = Counter(
            (op.wanted_only, part.shape if isinstance(part, DeviceWeight) else "")
            for index, op in enumerate(program.ops)
            if isinstance(op, Linear)
            for part in self._model.linears[index].parts
        )
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

    def submit(self, step: StepInput) -> SubmittedStep:
        """Enqueues a step, stage by stage (see `step.Backend`).

        Token ids that the step before chose are read on the device, so nothing of it has to be
        known here. A stage writes into layers of the cache that the same stage of the step before
        reads; only once that has been computed can MLX write in place, so that is waited for. The
        later stages of the step before keep the device busy meanwhile.

        Raises:
            ValueError: the step is malformed, two are pending, or the backend closed; nothing was
                written.
        """
        if not self._open:
            raise ValueError("[metal] the backend must be open, got a closed one")
        if len(self._pending) == MAX_PENDING_STEPS:
            raise ValueError(
                f"[step] at most {MAX_PENDING_STEPS} steps may be pending, got one more"
            )
        check_step(step, self._step_limits)
        began = time.perf_counter_ns()
        before = self._pending[-1].markers if self._pending else []
        ids = take_tokens(self._launcher, step, self._chosen, self._program.dimensions.vocab_size)
        profile, arrays = self._profile, self._arrays
        work = self._forward.prepare(step, ids, self._pool, profile)
        markers: list[LibraryArray] = []
        watched = Watched((), (), 0)
        for number, stage in enumerate(self._stages):
            if before:
                arrays.wait(before[number])
            for index in stage:
                self._forward.run_op(index, work, profile)
            live = work.live()
            if stage is self._stages[-1]:
                watched = watch(self._launcher, self._model, work.buffers, work.tokens)
                live += watched.arrays()
            arrays.start(*live, *(self._pool.layer(layer) for layer in self._written(stage)))
            # The least of them: a marker is held until the step after the next.
            markers.append(min(live, key=lambda array: int(array.size)))
        statistics = self._statistics(work)
        if statistics is not None:
            arrays.start(*statistics.arrays())
        work.buffers.clear()
        work.queries.clear()
        self._chosen = None if statistics is None else statistics.tokens_alone()
        pending = SubmittedStep(work, markers, watched, statistics, began, self._finish)
        self._pending.append(pending)
        return pending

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`).

        Raises:
            ValueError: the step is malformed, or the backend closed; nothing was written.
        """
        return self.submit(step).finish()

    def _written(self, stage: range) -> list[int]:
        """Layers whose cache a stage writes."""
        ops = (self._program.ops[index] for index in stage)
        return [op.layer for op in ops if isinstance(op, RopeWriteKV)]

    def _finish(self, pending: SubmittedStep) -> StepOutput:
        if not self._pending or self._pending[0] is not pending:
            raise ValueError("[step] steps must be finished once and in order, got another one")
        self._pending.popleft()
        arrays, work = self._arrays, pending.work
        arrays.wait(*pending.watched.arrays(), pending.markers[-1])
        middle = time.perf_counter_ns()
        results = empty_results(work.wanted)
        if pending.statistics is not None:
            results = read_statistics(arrays, pending.statistics)
        non_finite = np.full(len(work.step.query_start_loc) - 1, -1, np.int32)
        fits = (np.abs(results.max_logits) < 2.0**96).all()
        if pending.watched.is_suspicious(arrays) or not fits:
            non_finite = self._diagnose(work, results)
        pending.statistics = None  # rows of logits: whoever keeps the step has them from here on
        # A step that was submitted while another ran begins when that one ends.
        begin = max(pending.began_ns, self._last_end_ns)
        self._last_end_ns = end = time.perf_counter_ns()
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
            forward_ns=max(0, middle - begin),
            statistics_ns=end - middle,
            paths=self._count_paths(work),
        )

    def warm_up(self) -> None:
        """Compiles what steps will need: every tile of linear layers, both forms of attention for
        decoding and for prompts, statistics.

        Runs small steps over the first blocks and clears them, so call it before serving.
        """
        block_size, profile = self._limits.block_size, self._profile
        context = self._program.dimensions.context_length
        most = min(self._limits.max_num_batched_tokens, context)
        room = self._limits.num_blocks * block_size
        for rows, way in sorted(profile.linear.variants()):
            if rows <= min(most, room):
                tuned = replace(profile.linear, tuned=((rows, Choice(way)),))
                self._profile = replace(profile, linear=tuned)
                self.run(warm_up_step(0, rows, block_size))
        self._profile = profile
        # A token of the step before, which is on the device.
        self.run(replace(warm_up_step(0, 1, block_size), token_sources=np.zeros(1, np.int32)))
        for tokens in (1, 2):
            start = min(attn.CHUNK, context - tokens)
            if tokens > most or start < 0:
                continue
            # Its table names block 0 for every position: only the kernels matter.
            step = warm_up_step(start, tokens, block_size, one_block=True)
            ids = self._launcher.upload(step.token_ids)
            work = self._forward.prepare(step, ids, self._pool, profile)
            for index in range(len(self._program.ops)):
                self._forward.run_op(index, work, profile)
            self._arrays.wait(*work.live())
        blocks = min(-(-most // block_size), self._limits.num_blocks)
        self.zero_blocks(np.arange(blocks, dtype=np.int32))

    def choices(self, num_rows: int) -> Sequence[str]:
        """Ways in which linear layers of so many rows can run (`tuning.Tunable`)."""
        return self._profile.linear.choices(num_rows)

    def propose(self, num_rows: int, clock: Callable[[], int]) -> str:
        """The way that timing the layers' shapes one by one finds (`tuning.Proposing`)."""
        return fastest_choice(self._launcher, self._model, self._profile.linear, num_rows, clock)

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
        self._forward = Forward(self._program, self._launcher, self._model, None)
        self._pool = KeyValuePool(self._arrays, self._pool.layout, 0)
        self._pending.clear()
        self._chosen = None
        self._open = False

    def _statistics(self, work: StepWork) -> DeviceStatistics | None:
        for op in self._program.ops:
            if isinstance(op, RowStatistics) and work.wanted:
                logits, width = work.buffers[op.logits], self._model.widths[op.logits]
                return row_statistics(self._launcher, logits, width, work.step)
        return None

    def _diagnose(self, work: StepWork, results: RowResults) -> Int32:
        """Runs a step once more, op by op, to name each row's first op: rare, so not kept fast.

        It reads and writes copies of the blocks that the step sees. The next step may be running,
        and blocks of rows that ended may have other owners by now.
        """
        step = work.step
        blocks = np.unique(step.block_tables[step.block_tables >= 0]).astype(np.int32)
        tables = np.searchsorted(blocks, step.block_tables).astype(np.int32)
        copies = BlockCopies(self._arrays, self._pool, blocks)
        again = self._forward.prepare(
            replace(step, block_tables=tables), work.ids, copies, self._profile
        )

        def advance(index: int) -> dict[str, Any]:
            self._forward.run_op(index, again, self._profile)
            return again.buffers

        return find_first_ops(
            self._program, self._model, self._arrays, step, results.max_logits, advance
        )

    def _count_paths(self, work: StepWork) -> list[PathCount]:
        counts = []
        for count in self._paths.count(work.step):
            path = count.path
            if count.op == "linear":
                continue
            if count.op == "paged_attention":
                path = "attention_decode" if work.attention.split else "attention_prefill"
            counts.append(count._replace(path=path))
        layers: Counter[tuple[str, int]] = Counter()
        for (wanted_only, shape), number in self._linears.items():
            rows = work.wanted if wanted_only else work.tokens
            if rows:
                layers[kernel_of(self._profile.linear.choose(rows, shape)[0]), rows] += number
        counts += [
            PathCount("linear", path, self.unit, number, number * rows)
            for (path, rows), number in layers.items()
        ]
        return counts
