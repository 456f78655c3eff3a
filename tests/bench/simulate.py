"""Schedules thousands of simulated clients, by the product's core and by simpler policies.

    make simulate
    make simulate SIMULATE_ARGS="--clients 200 --workloads 'long prompts'"
    make simulate SIMULATE_ARGS="--trace AzureLLMInferenceTrace_conv.csv"

With --trace the synthetic workloads are left out, unless --workloads names some.

No model runs: steps take what the cost curve of a real machine says. Writes simulation-results/;
--publish also writes the tables of docs/simulation.md and docs/images/simulation.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.bench.simulation.executor import SimulatedExecutor  # noqa: E402 - the root comes first
from tests.bench.simulation.machine import Machine, load_curve  # noqa: E402
from tests.bench.simulation.picture import Series, draw  # noqa: E402
from tests.bench.simulation.policies import POLICIES, Named  # noqa: E402
from tests.bench.simulation.report import Goal, Summary, markdown, summarize  # noqa: E402
from tests.bench.simulation.settings import BLOCK_SIZE, NUM_BLOCKS, rate_for  # noqa: E402
from tests.bench.simulation.simulation import Outcome, Simulation, gaps  # noqa: E402
from tests.bench.simulation.workload import SYNTHETIC, Workload, at_rate, recorded  # noqa: E402

CURVE: Final = ROOT / "docs" / "measurements" / "cost_curve-amd-epyc.json"
RESULTS: Final = ROOT / "simulation-results"
PAGE: Final = ROOT / "docs" / "simulation.md"
PICTURE: Final = ROOT / "docs" / "images" / "simulation.svg"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
GOAL: Final = Goal(first_token=5.0, longest_gap=0.25)


def runs(
    workload: Workload, machine: Machine, policies: tuple[Named, ...], seed: int
) -> dict[str, Outcome]:
    """Run every policy over the workload; each begins with an empty cache."""
    outcomes = {}
    for policy in policies:
        executor = SimulatedExecutor(machine, NUM_BLOCKS, BLOCK_SIZE)
        started = time.perf_counter()
        outcome = Simulation(policy.make(machine), executor, seed).run(workload)
        outcomes[policy.name] = outcome
        took = time.perf_counter() - started
        print(
            f"  {policy.name}: {outcome.seconds:,.0f} s in {took:.1f} s, {outcome.num_steps:,} "
            f"steps of {took / outcome.num_steps * 1e6:.0f} us",
            file=sys.stderr,
        )
    return outcomes


def workloads(options: argparse.Namespace, machine: Machine) -> dict[str, Workload]:
    """Return what to simulate by name, each at the rate that the load asks for."""
    names = options.workloads or ([] if options.trace else list(SYNTHETIC))
    found = {name: SYNTHETIC[name](options.clients, options.seed) for name in names}
    if options.trace is not None:
        found[f"recorded: {options.trace.stem}"] = recorded(options.trace, options.clients)
    return {
        name: at_rate(each, rate_for(each, machine, options.load)) for name, each in found.items()
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=600, help="clients of each workload")
    parser.add_argument("--load", type=float, default=0.7, help="share of the machine's capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=Path, default=CURVE, help="cost curve, JSON")
    parser.add_argument("--workloads", nargs="+", choices=list(SYNTHETIC))
    parser.add_argument("--policies", nargs="+", choices=[each.name for each in POLICIES])
    parser.add_argument("--trace", type=Path, help="recorded arrivals, CSV in Azure's format")
    parser.add_argument("--publish", action="store_true", help="write the tables in docs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Simulate, print the tables, and write them, the figures and the picture."""
    options = parse(arguments)
    machine = Machine(load_curve(options.curve))
    summaries: list[Summary] = []
    series: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    policies = tuple(p for p in POLICIES if not options.policies or p.name in options.policies)
    for name, workload in workloads(options, machine).items():
        print(name, file=sys.stderr)
        outcomes = runs(workload, machine, policies, options.seed)
        summaries += [summarize(name, each, outcomes[each], GOAL) for each in outcomes]
        series[name] = {each: times(outcome) for each, outcome in outcomes.items()}
    table = markdown(summaries)
    print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "simulation.md").write_text(table + "\n")
    document = {
        "clients": options.clients, "load": options.load, "seed": options.seed,
        "curve": options.curve.name, "summaries": [asdict(each) for each in summaries],
    }  # fmt: skip
    (RESULTS / "simulation.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(series, RESULTS / "simulation.svg")
    if options.publish:
        publish(table, series)
    return 0


def times(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Return the times to first token and the gaps of a run."""
    records = outcome.records.values()
    first = [each.token_times[0] - each.arrival for each in records]
    return first, [gap for each in records for gap in gaps(each)]


def publish(table: str, series: Series) -> None:
    """Put the tables between the page's marks, and the picture beside it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}")
    draw(series, PICTURE)


if __name__ == "__main__":
    sys.exit(main())
