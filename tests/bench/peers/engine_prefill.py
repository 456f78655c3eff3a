"""Prefill of our engine alone, in this process: a MODEL in, tokens a second by length out (JSON).

Like llama-bench's: one warm-up, then one prompt of each length in one step, no services.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "kernels"))

from benchmarks.bench_linear import BLOCK_SIZE, step_of
from executor_service.models.load import load_model
from executor_service.models.registry import ModelLocation
from isobatch_kernels.dispatch import create_backend


def main() -> None:
    """Times one step of each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lengths", default="128,512")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    backend = create_backend(
        load_model(ModelLocation(args.model, "bench")).program,
        num_blocks=max(lengths) // BLOCK_SIZE + 1,
        max_num_seqs=16,
        max_num_batched_tokens=max(lengths),
        num_threads=args.threads,
    )
    rates: dict[int, float] = {}
    for length in lengths:
        step = step_of(length, 0)
        backend.run(step)
        started = time.perf_counter()
        backend.run(step)
        rates[length] = length / (time.perf_counter() - started)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
