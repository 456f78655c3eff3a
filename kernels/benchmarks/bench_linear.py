"""Times of steps of SmolLM2-135M's shape with random weights: by unit and by rows.

Run: python kernels/benchmarks/bench_linear.py [--units vnni,avx2] [--rows 1,2,4] [--threads 2]
     [--activations 12,8] [--context 100] [--seconds 1.0] [--json]

Each cell is one whole step (all layers, head and argmax). Units and row counts are interleaved,
so that a change of the machine's speed meets all of them; the median and the best of each cell are
printed. Up to 64 rows are decode rows, each of its own sequence; more are one prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np

from isobatch_kernels.dispatch import available_units, create_backend
from isobatch_kernels.program import (
    Buffer,
    Dimensions,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    Op,
    PagedAttention,
    Program,
    Quantize,
    QuantizedWeight,
    RopeSpec,
    RopeWriteKV,
    RowStatistics,
)
from isobatch_kernels.step import Backend, Stat, StepInput

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MOST_DECODE_ROWS = 64
BLOCK_SIZE = 16


def weight(rng: np.random.Generator, outputs: int, inputs: int, bits: int) -> QuantizedWeight:
    """Random integers in groups of 32 with fp16 scales, like a Q4_1 or Q8_0 tensor."""
    packed = rng.integers(0, 2**32, (outputs, inputs * bits // 32), dtype=np.uint32)
    scales = rng.uniform(0.005, 0.015, (outputs, inputs // 32)).astype(np.float16)
    centre = -128.0 if bits == 8 else -7.5
    return QuantizedWeight(packed, scales, (scales * centre).astype(np.float16), bits, 32)


def smollm2_program() -> Program:
    """The Program of SmolLM2-135M Q4_1 with random weights."""
    rng = np.random.default_rng(0)
    ones = np.ones(HIDDEN, np.float32)
    embedding = weight(rng, VOCAB, HIDDEN, 8)
    ops: list[Op] = [Embed(embedding, "x")]
    for layer in range(LAYERS):
        ops += [
            NormQuantize("x", ones, 1e-5, "a"),
            Linear("a", (weight(rng, QKV, HIDDEN, 4),), "qkv"),
            RopeWriteKV("qkv", layer),
            PagedAttention("qkv", layer, "attention"),
            Quantize("attention", "a"),
            Linear("a", (weight(rng, HIDDEN, HIDDEN, 4),), "x", residual="x"),
            NormQuantize("x", ones, 1e-5, "a"),
            Linear("a", (weight(rng, 2 * INNER, HIDDEN, 4),), "gate_up"),
            GateQuantize("gate_up", "inner"),
            Linear("inner", (weight(rng, HIDDEN, INNER, 4),), "x", residual="x"),
        ]
    ops += [
        NormQuantize("x", ones, 1e-5, "last", wanted_only=True),
        Linear("last", (embedding,), "logits", wanted_only=True),
        RowStatistics("logits"),
    ]
    buffers = (
        Buffer("x", HIDDEN),
        Buffer("a", HIDDEN, 32),
        Buffer("qkv", QKV),
        Buffer("attention", HEADS * HEAD_DIM),
        Buffer("gate_up", 2 * INNER),
        Buffer("inner", INNER, 32),
        Buffer("last", HIDDEN, 32),
        Buffer("logits", VOCAB),
    )
    dims = Dimensions(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, 8192, HEAD_DIM**-0.5)
    return Program(dims, RopeSpec(10000.0, HEAD_DIM, interleaved=True), buffers, tuple(ops))


def step_of(rows: int, context: int) -> StepInput:
    """Decode rows at `context`, or one prompt of many rows from position 0."""
    sequences, length = (rows, 1) if rows <= MOST_DECODE_ROWS else (1, rows)
    start = context if length == 1 else 0
    blocks = (start + length - 1) // BLOCK_SIZE + 1
    rng = np.random.default_rng(1)
    return StepInput(
        token_ids=rng.integers(0, VOCAB, rows, dtype=np.int32),
        positions=np.tile(np.arange(start, start + length, dtype=np.int32), sequences),
        query_start_loc=np.arange(sequences + 1, dtype=np.int32) * length,
        block_tables=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        wanted=np.arange(1, sequences + 1, dtype=np.int32) * length - 1,
        statistics=np.full(sequences, Stat.ARGMAX, np.uint32),
        top_k=np.zeros(sequences, np.int32),
        inverse_temperatures=np.ones(sequences, np.float32),
        quantiles=np.zeros(sequences, np.float32),
        edit_starts=np.zeros(sequences + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
    )


def measure(
    backends: dict[str, Backend], steps: dict[int, StepInput], seconds: float
) -> dict[tuple[str, int], list[float]]:
    """Milliseconds of every step: at least 5 and `seconds` of work for each unit and row count."""
    times: dict[tuple[str, int], list[float]] = {(u, r): [] for u in backends for r in steps}
    for backend in backends.values():
        for step in steps.values():
            backend.run(step)
    while unfinished := [c for c, t in times.items() if len(t) < 5 or sum(t) < 1000 * seconds]:
        for unit, rows in unfinished:
            begin = time.perf_counter()
            backends[unit].run(steps[rows])
            times[unit, rows].append(1000 * (time.perf_counter() - begin))
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    fast = [unit for unit in available_units() if unit not in ("scalar", "reference")]
    parser.add_argument("--units", default=",".join(fast or ["scalar"]))
    parser.add_argument("--rows", default=",".join(map(str, (*range(1, 17), 128, 512))))
    parser.add_argument("--activations", default="12", help="bits: 12, 8 or both (12,8)")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as usable CPUs")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1.0, help="of work for each cell")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    rows = [int(r) for r in args.rows.split(",")]
    steps = {r: step_of(r, args.context) for r in rows}
    program = smollm2_program()
    backends = {
        unit if bits == "12" else f"{unit}-a{bits}": create_backend(
            replace(program, activation_bits=int(bits)),
            num_blocks=max(int(s.block_tables.max()) for s in steps.values()) + 1,
            max_num_seqs=MOST_DECODE_ROWS,
            max_num_batched_tokens=max(rows),
            unit=unit,
            num_threads=args.threads,
        )
        for unit in args.units.split(",")
        for bits in args.activations.split(",")
    }
    cells = [
        {
            "unit": unit,
            "rows": r,
            "median_ms": round(float(np.median(t)), 3),
            "best_ms": round(min(t), 3),
            "steps": len(t),
            "rows_per_second": round(1000 * r / float(np.median(t))),
        }
        for (unit, r), t in measure(backends, steps, args.seconds).items()
    ]
    if args.json:
        print(json.dumps(cells, indent=1))
        return
    print(f"{'unit':<10}{'rows':>6}{'median ms':>12}{'best ms':>10}{'rows/s':>9}{'steps':>7}")
    for c in cells:
        print(
            f"{c['unit']:<10}{c['rows']:>6}{c['median_ms']:>12}{c['best_ms']:>10}"
            f"{c['rows_per_second']:>9}{c['steps']:>7}"
        )


if __name__ == "__main__":
    main()
