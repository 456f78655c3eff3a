"""Whole steps on the GPU: ours, beside mlx-lm's on the same weights, and equality with the CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cuda_models import ModelShape, random_program
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.driver import DriverDevice
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits
from isobatch_kernels.dispatch import choose_unit
from isobatch_kernels.step import Backend, Stat, StepInput

Row = dict[str, Any]
_BLOCK = 16


def make_step(
    lengths: Sequence[int],
    positions: Sequence[int],
    tables: Sequence[Sequence[int]],
    vocabulary: int,
    seed: int = 0,
    statistics: int = Stat.ARGMAX,
) -> StepInput:
    """A step whose rows begin at `positions`; every row's last token is wanted."""
    rng = np.random.default_rng(seed)
    rows, tokens = len(lengths), sum(lengths)
    width = max(len(table) for table in tables)
    blocks = np.full((rows, width), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        blocks[row, : len(table)] = table
    spans = zip(positions, lengths, strict=True)
    return StepInput(
        token_ids=rng.integers(0, vocabulary, tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in spans]),
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        block_tables=blocks,
        wanted=(np.cumsum(lengths) - 1).astype(np.int32),
        statistics=np.full(rows, statistics, dtype=np.uint32),
        top_k=np.full(rows, 20, dtype=np.int32),
        inverse_temperatures=np.full(rows, 1.25, dtype=np.float32),
        quantiles=rng.random(rows).astype(np.float32),
        edit_starts=np.zeros(rows + 1, dtype=np.int32),
        edit_ids=np.zeros(0, dtype=np.int32),
        edit_values=np.zeros(0, dtype=np.float32),
    )


def _tables(rows: int, context: int) -> list[list[int]]:
    blocks = -(-(context + 64) // _BLOCK)
    return [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]


def _milliseconds(run: Callable[[], None], warm: int, repeats: int) -> float:
    """Median milliseconds of a call."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def _run(backend: Backend, step: StepInput) -> None:
    backend.run(step)


def measure_steps(
    shape: ModelShape,
    rows_of_512: Sequence[int],
    contexts: Sequence[tuple[int, int]] = ((1, 16384), (8, 16384)),
    *,
    peer: bool = True,
    pairs: int = 5,
    layers: int = 0,
) -> Iterator[Row]:
    """Decode steps at several row counts and contexts, and the prefill of 2,048 tokens.

    Ours from StepInput to StepOutput; with `peer` mlx-lm's by turns, on the same weights.
    """
    model: Any = None
    if peer:
        from benchmarks import cuda_peer

        model = cuda_peer.peer_model(shape)
        program = cuda_peer.program_of_peer(model, shape)
    else:
        program = random_program(replace(shape, layers=layers or shape.layers))
    most = max(rows_of_512)
    cases = [*((rows, 512) for rows in rows_of_512), *contexts]
    blocks = most * (-(-(512 + 64) // _BLOCK)) + 8 * (16384 // _BLOCK + 4)
    limits = CudaLimits(blocks, _BLOCK, max(most, 8), 2048)
    backend = CudaBackend(program, limits, DriverDevice(), timed=True)
    del program
    for rows, context in cases:
        step = make_step([1] * rows, [context] * rows, _tables(rows, context), shape.vocabulary)
        decode = functools.partial(_run, backend, step)
        ours, theirs = [], []
        them = None
        if peer:
            them = cuda_peer.PeerDecode(model, shape, rows, context)
        for _ in range(pairs):
            ours.append(_milliseconds(decode, 2, 7))
            if them is not None:
                theirs.append(_milliseconds(them.step, 2, 7))
        yield _row(f"decode at {context}", rows, ours, theirs)
    prefill = functools.partial(
        _run, backend, make_step([2048], [0], _tables(1, 2048), shape.vocabulary)
    )
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(_milliseconds(prefill, 1, 2))
        if peer:
            theirs.append(
                _milliseconds(functools.partial(cuda_peer.peer_prefill, model, 2048), 1, 2)
            )
    yield _row("prefill", 2048, ours, theirs)
    backend.close()


def _row(what: str, rows: int, ours: list[float], theirs: list[float]) -> Row:
    row: Row = {
        "what": what,
        "rows": rows,
        "ours_ms": [round(value, 3) for value in ours],
        "ours_median_ms": round(float(np.median(ours)), 3),
    }
    if theirs:
        row["mlx_lm_ms"] = [round(value, 3) for value in theirs]
        row["mlx_lm_median_ms"] = round(float(np.median(theirs)), 3)
        row["ratio"] = round(float(np.median(theirs) / np.median(ours)), 2)
    return row


def compare_with_cpu(shape: ModelShape, layers: int, vocabulary: int = 16384) -> Row:
    """Prefill of two rows, then decode and mixed steps, on both backends: every byte of results."""
    small = replace(
        shape, layers=layers, context=2048, vocabulary=min(shape.vocabulary, vocabulary)
    )
    program = random_program(small, seed=1)
    cpu = CpuBackend(program, CpuLimits(128, _BLOCK, 8, 1024), unit=choose_unit())
    gpu = CudaBackend(program, CudaLimits(128, _BLOCK, 8, 1024), DriverDevice())
    tables = [list(range(40)), list(range(40, 60)), list(range(60, 80)), list(range(80, 100))]
    plan = (
        ([517, 40], [0, 0], tables[:2]),
        ([1, 1, 70], [517, 40, 0], tables[:3]),
        ([1, 1, 1, 3], [518, 41, 70, 0], tables),
        ([1, 1, 1, 1], [519, 42, 71, 3], tables),
    )
    asked = int(Stat.ARGMAX | Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE)
    names = ["logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids"]
    names += ["top_k_ids", "top_k_logits", "top_k_weights", "non_finite_ops"]
    differing, compared = 0, 0
    # The last step twice more: recorded, then replayed.
    for seed, (lengths, positions, some) in enumerate([*plan, plan[-1], plan[-1]]):
        step = make_step(lengths, positions, some, small.vocabulary, seed, asked)
        outputs = cpu.run(step), gpu.run(step)
        for name in names:
            a, b = (np.ascontiguousarray(np.asarray(getattr(o, name))) for o in outputs)
            compared += a.size
            differing += int((a.view(np.uint32) != b.view(np.uint32)).sum())
    caches = sum(int((cpu.read_block(i) != gpu.read_block(i)).sum()) for i in range(100))
    gpu.close()
    return {
        "model": f"{shape.name}-shaped, {layers} layers, {small.vocabulary} ids",
        "cpu_unit": cpu.unit,
        "numbers_compared": compared,
        "numbers_differing": differing,
        "cache_values_differing": caches,
    }
