"""Time to the first token of a long prompt: cold, from cached blocks in memory, and on disk.

    python tests/bench/bench_prefix.py [--rounds N] [--tokens N]

The three take turns on one pair of processes over the default model. Its pool holds two prompts and
a half, so that two others push the first one out to disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from scheduler_service.client import Client, GenerationParams
from tests.support.embedded_model import embedded_model_path
from tests.support.services import running_pair

KILOBYTES_PER_TOKEN = 23.04  # SmolLM2-135M: 30 layers, 3 heads of 64, keys and values of 2 bytes


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1100)
    options = parser.parse_args()
    rounds, count = options.rounds, options.tokens
    seconds: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    cached: dict[str, list[int]] = {name: [] for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        pool_mb = int(2.5 * count * KILOBYTES_PER_TOKEN / 1024)
        flags = ("--kv-memory-mb", str(pool_mb), "--prefix-disk-mb", "2000",
                 "--prefix-disk-dir", folder)  # fmt: skip
        with (
            running_pair(embedded_model_path(), executor_flags=flags) as pair,
            Client(pair.schedulers[0].address) as client,
        ):

            def ask(case: str, salt: str) -> None:
                ids = [100 + 7 * index % 4000 for index in range(count)]
                params = GenerationParams(max_tokens=1, temperature=0, cache_salt=salt)
                done = client.complete(ids, params)
                if case:
                    seconds[case].append(done.timings.time_to_first_token_seconds)
                    cached[case].append(done.usage.num_cached_tokens)

            ask("", "first")
            for number in range(rounds):
                salt = f"round {number}"
                ask("cold", salt)
                ask("memory", salt)
                for other in range(2):
                    ask("", f"other {number} {other}")
                _settle(Path(folder))
                ask("disk", salt)
    for case, values in seconds.items():
        print(
            f"{case}: median {statistics.median(values) * 1e3:.1f} ms, "
            f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}, cached {cached[case]}"
        )


def _settle(folder: Path) -> None:
    """Wait until no record has appeared for a while."""
    before = -1
    while (now := len(list(folder.rglob("*.kv")))) != before:
        before = now
        time.sleep(0.5)


if __name__ == "__main__":
    main()
