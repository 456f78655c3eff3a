"""The matrix products of one step of SmolLM2-135M in our engine (JSON: milliseconds by rows).

The counterpart of ggml_matmuls.cpp: the same shapes with random weights, activations quantised
before each product (ggml does that inside of it). The embedding and the search for the largest
logit come on top, because every step of ours has them. Rows are sequences of one token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[3] / "kernels"))

from benchmarks.bench_linear import HIDDEN, INNER, LAYERS, QKV, VOCAB, smollm2_program, step_of
from benchmarks.bench_linear import weight as random_weight
from isobatch_kernels.dispatch import create_backend
from isobatch_kernels.program import (
    Buffer,
    Embed,
    Linear,
    NormQuantize,
    Op,
    Program,
    Quantize,
    RowStatistics,
)


def matmul_program() -> Program:
    """The products alone, merged as our models merge them."""
    rng = np.random.default_rng(0)
    head = random_weight(rng, VOCAB, HIDDEN, 8)
    ops: list[Op] = [Embed(head, "x")]
    for _ in range(LAYERS):
        ops += [
            Quantize("x", "a"),
            Linear("a", (random_weight(rng, QKV, HIDDEN, 4),), "qkv"),
            Quantize("x", "a"),
            Linear("a", (random_weight(rng, HIDDEN, HIDDEN, 4),), "out"),
            Quantize("x", "a"),
            Linear("a", (random_weight(rng, 2 * INNER, HIDDEN, 4),), "gate_up"),
            Quantize("wide", "inner"),
            Linear("inner", (random_weight(rng, HIDDEN, INNER, 4),), "out"),
        ]
    ops += [
        NormQuantize("x", np.ones(HIDDEN, np.float32), 1e-5, "last", wanted_only=True),
        Linear("last", (head,), "logits", wanted_only=True),
        RowStatistics("logits"),
    ]
    whole = smollm2_program()
    buffers = (*whole.buffers, Buffer("out", HIDDEN), Buffer("wide", INNER))
    return Program(whole.dimensions, whole.rope, buffers, tuple(ops))


def main() -> None:
    """Times the products for every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--activations", type=int, default=12, help="bits: 12 or 8")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    counts = [int(count) for count in args.rows.split(",")]
    backend = create_backend(
        replace(matmul_program(), activation_bits=args.activations),
        num_blocks=max(counts) + 1,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(counts),
        num_threads=args.threads,
    )
    found: dict[int, list[float]] = {}
    for count in counts:
        step = step_of(count, 0)
        backend.run(step)
        times = found[count] = []
        for _ in range(args.repetitions):
            started = time.perf_counter()
            backend.run(step)
            times.append(1e3 * (time.perf_counter() - started))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
