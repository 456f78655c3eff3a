"""The simulator: nobody is lost, a seed gives the same run, and the comparison means something."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scheduler_service.core import SequenceId
from scheduler_service.core.cost_curve import CostCurve, CostPoint
from tests.bench.simulate import CURVE, main
from tests.bench.simulation.executor import SimulatedExecutor
from tests.bench.simulation.lengths import CODE_ANSWER, CONVERSATION_PROMPT
from tests.bench.simulation.machine import Machine, load_curve
from tests.bench.simulation.policies import POLICIES, Isobatch
from tests.bench.simulation.prefix_store import PrefixStore
from tests.bench.simulation.report import Goal, jain, markdown, percentile, summarize
from tests.bench.simulation.settings import BLOCK_SIZE, NUM_BLOCKS, limits, rate_for
from tests.bench.simulation.simulation import Outcome, Simulation, gaps
from tests.bench.simulation.workload import (
    SYNTHETIC,
    Conversation,
    Turn,
    Workload,
    at_rate,
    recorded,
)

GOAL = Goal(first_token=5.0, longest_gap=0.25)
MACHINE = Machine(load_curve(CURVE))
BY_NAME = {each.name: each for each in POLICIES}


def simulate(
    policy: str, workload: Workload, seed: int = 0, num_blocks: int = NUM_BLOCKS
) -> Outcome:
    executor = SimulatedExecutor(MACHINE, num_blocks, BLOCK_SIZE)
    outcome = Simulation(BY_NAME[policy].make(MACHINE), executor, seed).run(workload)
    assert executor.store.num_sequences == 0
    assert executor.store.counts().free + executor.store.counts().evictable == num_blocks
    return outcome


def busy(name: str, num_clients: int, load: float = 0.8) -> Workload:
    workload = SYNTHETIC[name](num_clients, 7)
    return at_rate(workload, rate_for(workload, MACHINE, load))


def check_conserved(outcome: Outcome, workload: Workload) -> None:
    """Every turn was asked once, ended once and got every token of its answer, in order."""
    assert len(outcome.records) == sum(len(each.turns) for each in workload)
    for record in outcome.records.values():
        assert record.ends == 1
        assert len(record.token_times) == record.num_answer
        assert record.arrival < record.token_times[0]
        assert all(gap > 0 for gap in gaps(record))


@pytest.mark.parametrize("policy", BY_NAME)
@pytest.mark.parametrize("workload", SYNTHETIC)
def test_every_request_ends_once(policy: str, workload: str) -> None:
    asked = busy(workload, 12)
    check_conserved(simulate(policy, asked), asked)


def test_nobody_is_lost_where_the_cache_is_too_small() -> None:
    asked = tuple(Conversation(n, n / 100, (Turn(200, 300),)) for n in range(12))
    num_blocks = 120
    policy = Isobatch(dataclasses.replace(limits(512, MACHINE.curve), num_blocks=num_blocks))
    executor = SimulatedExecutor(MACHINE, num_blocks, BLOCK_SIZE)
    outcome = Simulation(policy, executor).run(asked)
    check_conserved(outcome, asked)
    assert outcome.num_preemptions > 0


@pytest.mark.parametrize("policy", BY_NAME)
def test_a_seed_gives_the_same_run(policy: str) -> None:
    asked = busy("shared chats", 8)
    first, again = (simulate(policy, asked, seed=3) for _ in range(2))
    assert first == again
    assert SYNTHETIC["shared chats"](8, 7) != SYNTHETIC["shared chats"](8, 8)


def test_long_prompts_stop_streams_for_prefill_first_and_not_for_us() -> None:
    asked = busy("long prompts", 40)
    longest = {
        name: max(gap for each in simulate(name, asked).records.values() for gap in gaps(each))
        for name in ("isobatch", "prefill first", "first come, whole prompts")
    }
    # A step of 6,000 tokens takes seconds on this machine.
    assert longest["isobatch"] < 0.15
    assert longest["prefill first"] > 5.0
    assert longest["first come, whole prompts"] > 5.0


def test_what_was_said_before_comes_from_the_cache() -> None:
    turns = (Turn(30, 20), Turn(30, 20, 1.0), Turn(30, 20, 1.0))
    outcome = simulate("isobatch", (Conversation(0, 0.0, turns, 1, 160),))
    num_known = sum(each.num_prompt for each in outcome.records.values())
    assert outcome.num_cached_tokens > num_known // 2
    # The last token of an answer is never computed; a cached prefix ends with a block.
    assert outcome.num_cached_tokens + outcome.num_computed_tokens == num_known + 3 * 19


def test_the_store_shares_and_evicts() -> None:
    store = PrefixStore(num_blocks=4, block_size=2)
    first, second, third = (SequenceId(each) for each in (1, 2, 3))
    assert store.open(first, "", (1, 2, 3, 4, 5)) == 0
    assert store.grow({first: (1, 2, 3, 4, 5)})
    assert store.counts().free == 1
    # The last token is computed always, and another tenant sees nothing.
    assert store.open(second, "", (1, 2, 3, 4)) == 2
    assert store.counts().shared == 1
    assert store.open(third, "salt", (1, 2, 3, 4)) == 0
    assert not store.grow({third: (1, 2, 3)})
    store.release([first])
    assert (store.counts().free, store.counts().evictable, store.counts().shared) == (2, 1, 0)
    assert store.grow({third: (1, 2, 3, 4, 5, 6)})
    assert (store.counts().free, store.counts().evictable) == (0, 0)
    store.release([second, third])
    assert store.open(first, "", (1, 2, 3, 4, 5)) == 2


def test_a_prompt_in_one_piece_costs_no_less_than_in_pieces() -> None:
    longest = MACHINE.curve.prompt_sizes[-1]
    whole = MACHINE.seconds([(4 * longest, 0)])
    pieces = sum(MACHINE.seconds([(longest, each * longest)]) for each in range(4))
    assert 0.8 * pieces < whole < 1.2 * pieces
    assert MACHINE.seconds([]) == 0.0
    assert MACHINE.seconds([(1, 1000)]) > MACHINE.seconds([(1, 0)])


def test_a_recorded_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,90000,0\n"
        "2023-11-16 18:15:48.1,10,2\n"
    )
    found = recorded(path, 2)
    assert [each.turns for each in found] == [(Turn(374, 44),), (Turn(10, 2),)]
    assert found[1].start == pytest.approx(1.41941)
    assert recorded(path, 9)[2].turns == (Turn(6000, 1),)


def test_lengths_are_those_of_the_trace() -> None:
    assert 1140 < CONVERSATION_PROMPT.mean < 1400
    drawn = sorted(each.turns[0].num_new for each in SYNTHETIC["conversations"](2001, 5))
    assert 900 < drawn[1000] < 1060
    assert CODE_ANSWER.values[0] == 6


def test_percentiles_and_fairness() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.25, 0.5, 0.51, 1.0)] == [1, 2, 3, 4]
    assert jain([2, 2, 2]) == 1.0
    assert jain([1, 0, 0, 0]) == 0.25


def test_served_well_needs_both() -> None:
    asked = (Conversation(0, 0.0, (Turn(10, 3),)),)
    outcome = simulate("isobatch", asked)
    (record,) = outcome.records.values()
    assert GOAL.holds(record)
    assert not Goal(0.0, 1.0).holds(record)
    assert not Goal(1.0, 0.0).holds(record)
    row = summarize("w", "p", outcome, GOAL)
    assert (row.good_share, row.fairness, row.num_requests) == (1.0, 1.0, 1)
    assert "| p | " in markdown([row])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.simulate.RESULTS", tmp_path)
    assert main(["--clients", "3", "--workloads", "long prompts"]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        "simulation.json", "simulation.md", "simulation.svg",
    }  # fmt: skip


def test_a_curve_needs_no_context_points() -> None:
    machine = Machine(CostCurve([CostPoint(1, 1, 0, 0.004), CostPoint(1, 64, 0, 0.05)]))
    assert machine.seconds([(64, 100)]) == pytest.approx(0.05)
