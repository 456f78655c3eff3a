r"""Load for as long as wanted, with a report.

    python tests/stress/run_stress.py --minutes 10 --streams 64
    python tests/stress/run_stress.py --model tiny --minutes 3 --streams 1,16,256 \
        --kill-executor 5 --units auto,avx2,scalar

Each round of a minute ends with a look at the idle services. The exit status is 1 when a text
changed or something leaked. A run with the same --seed asks for the same requests, in the same
order on each stream.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.stress.load_harness import Settings, stress
from tests.stress.profiles import PROFILES
from tests.stress.report import markdown, write_json


def main() -> int:
    """Parse flags, run, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=tuple(PROFILES), default="real")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", default="64", help="one number or several, taken in turn")
    parser.add_argument("--round-seconds", type=float, default=60.0)
    parser.add_argument(
        "--hang-seconds", type=float, default=300.0, help="a request that takes longer hangs"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=40, help="number of distinct requests")
    parser.add_argument("--kv-memory-mb", type=int, default=0, help="0 for a small one")
    parser.add_argument(
        "--kill-executor", type=float, default=0.0, help="mean seconds between kills; 0 for none"
    )
    parser.add_argument(
        "--units", default="auto", help="kernel units of the executors that follow each other"
    )
    parser.add_argument("--json", type=Path, default=Path("stress-results/stress.json"))
    args = parser.parse_args()
    # So that the services are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    counts = [int(count) for count in args.streams.split(",")]
    num_rounds = max(1, round(60 * args.minutes / args.round_seconds))
    settings = Settings(
        profile=args.model,
        seed=args.seed,
        pool_size=args.pool,
        rounds=tuple(counts[index % len(counts)] for index in range(num_rounds)),
        seconds_per_round=args.round_seconds,
        hang_seconds=args.hang_seconds,
        executor_kill_seconds=args.kill_executor,
        units=tuple(args.units.split(",")),
        kv_memory_mb=args.kv_memory_mb or (1 if args.model == "tiny" else 48),
    )
    result = stress(settings, lambda line: print(line, flush=True))
    write_json(args.json, result)
    summary = markdown(result)
    args.json.with_suffix(".md").write_text(summary)
    print(summary)
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
