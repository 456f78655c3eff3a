"""The experiments: speed by concurrency, the switch of kernels, and what company changes.

All of them drive executors directly, so that which rows share a step is chosen and not a matter of
time. One executor for each policy of `POLICIES` stays up, and rounds interleave the policies.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from scheduler_service.lab.bench_executor import BenchExecutor, Outcome, Row

POLICIES: Final = ("gemv", "gemm", "threshold", "mlx", "exact")
# Of the speed table: its columns, and the policy whose executor gives each.
_UNBATCHED: Final = "unbatched"
MODES: Final = {
    _UNBATCHED: "gemv",
    "batched GEMM": "gemm",
    "batched row-by-row GEMV": "gemv",
    "threshold": "threshold",
    "MLX's choice": "mlx",
    "exact": "exact",
}
_VERIFY_ROWS: Final = 4
_SWITCH_STEPS: Final = 6

Bench = Mapping[str, BenchExecutor]
Progress = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the experiments."""

    concurrency: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    rounds: int = 5
    decode_steps: int = 16  # of a round, for each sequence
    prompt_tokens: int = 32  # of a sequence whose decoding is timed
    texts: int = 8
    story_tokens: int = 128  # of a text whose divergence is looked for
    neighbours: int = 7
    prefill_tokens: int = 120
    later_tokens: int = 8


QUICK: Final = Plan(
    concurrency=(1, 2, 5), rounds=1, decode_steps=3, prompt_tokens=8, texts=2, story_tokens=12,
    neighbours=4, prefill_tokens=24, later_tokens=3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plans:
    """The plan, and a smaller one for policies that are slow on this machine."""

    usual: Plan
    slow: frozenset[str] = frozenset()

    def of(self, policy: str) -> Plan:
        """Return a policy's plan. What it compares is the same: rows of a step, and kernels."""
        usual = self.usual
        if policy not in self.slow:
            return usual
        return replace(
            usual,
            rounds=1,
            decode_steps=min(2, usual.decode_steps),
            prompt_tokens=min(4, usual.prompt_tokens),
            texts=min(2, usual.texts),
            story_tokens=min(8, usual.story_tokens),
        )


def is_slow(numeric_class: str) -> bool:
    """Return whether a class computes so slowly that it gets the smaller plan.

    MLX's CPU kernels take a tenth of a second for a token of a small model.
    """
    return numeric_class.startswith("F1-mlx-") and "-cpu-" in numeric_class


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens in a second by the median step, by mode in the order of the plan's concurrency."""

    concurrency: tuple[int, ...]
    tokens_per_second: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Switch:
    """Where kernels change with the rows of a step; None where they do not in what was tried."""

    # Least rows from which GEMM was faster than row-by-row GEMV at every count tried.
    pays_from_rows: int | None
    # By policy: least rows at which a row's logits differ from those alone.
    differs_from_rows: dict[str, int | None]
    # By policy: kernel paths of linear layers, by rows tried.
    paths: dict[str, tuple[str, ...]]
    rows_tried: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopTwo:
    """The two likeliest tokens."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One greedy text alone and in company, under one policy; None where nothing differs."""

    policy: str
    text_index: int
    num_tokens: int
    first_digest: int | None  # first token whose logits differ
    first_token: int | None  # first token that is another
    alone: TopTwo | None  # at the first token that is another
    together: TopTwo | None


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """Four verify rows alone, and beside another request's prompt in the same step."""

    policy: str
    step_tokens: int  # of the shared step
    verify_logits_differ: int  # of the four
    kv_positions_differ: int | None  # None where the executor does not tell
    # Of tokens computed afterwards, each in a step of its own.
    later_logits_differ: int
    later_tokens: int


def _prompt(bench: BenchExecutor, seed: int, count: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary; which they are does not matter to speed."""
    return tuple((7919 * (seed + 1) + 104729 * i) % bench.vocab_size for i in range(count))


async def by_policy(
    benches: Bench, experiment: Callable[[Bench], Awaitable[list[Found]]], *, at_once: bool
) -> list[Found]:
    """Run an experiment under each policy; `at_once` where executors do not share the cores.

    What is counted is the same either way. Steps on a GPU wait for the host, so there five
    executors take little longer than one.
    """
    runs = (experiment({policy: bench}) for policy, bench in benches.items())
    each = await asyncio.gather(*runs) if at_once else [await run for run in runs]
    return [one for found in each for one in found]


async def start_sequence(bench: BenchExecutor, tokens: Sequence[int]) -> tuple[int, Outcome]:
    """Open a sequence and compute its prompt in a step of its own."""
    sequence = await bench.open()
    step = await bench.step([Row(sequence, tuple(tokens))])
    return sequence, step.outcomes[0][0]


async def _decode_seconds(
    bench: BenchExecutor, sequences: list[int], steps: int, *, one_by_one: bool
) -> list[float]:
    """Seconds of greedy steps, all sequences in each or one after the other."""
    seconds = []
    groups = [[each] for each in sequences] if one_by_one else [sequences]
    for group in groups:
        tokens = [1] * len(group)
        for _ in range(steps):
            rows = [Row(each, (token,)) for each, token in zip(group, tokens, strict=True)]
            step = await bench.step(rows, wants_digests=False)
            tokens = [outcome[0].token_id for outcome in step.outcomes]
            seconds.append(step.seconds)
    return seconds


async def speed(benches: Bench, plans: Plans, progress: Progress) -> Speed:
    """Measure decoding at each concurrency; policies alternate within a round.

    The median is over all steps of all rounds: other work on the machine holds up single steps.
    """
    concurrency = plans.usual.concurrency
    found: dict[str, dict[int, list[float]]] = {
        mode: {count: [] for count in concurrency} for mode in MODES
    }
    for round_index in range(plans.usual.rounds):
        progress(f"speed, round {round_index + 1} of {plans.usual.rounds}")
        for count in concurrency:
            for mode, policy in MODES.items():
                plan = plans.of(policy)
                if round_index >= plan.rounds:
                    continue
                bench = benches[policy]
                prompts = [_prompt(bench, i, plan.prompt_tokens) for i in range(count)]
                sequences = [(await start_sequence(bench, each))[0] for each in prompts]
                found[mode][count] += await _decode_seconds(
                    bench, sequences, plan.decode_steps, one_by_one=mode == _UNBATCHED
                )
                for sequence in sequences:
                    bench.release(sequence)
    medians = {
        mode: tuple(
            (1 if mode == _UNBATCHED else count) / max(statistics.median(values), 1e-9)
            for count, values in by_count.items()
        )
        for mode, by_count in found.items()
    }
    return Speed(concurrency, medians)


def pays_from(speeds: Speed) -> int | None:
    """Return the least rows from which GEMM beats row-by-row GEMV at every larger count."""
    gemm = speeds.tokens_per_second["batched GEMM"]
    gemv = speeds.tokens_per_second["batched row-by-row GEMV"]
    answer = None
    for count, one, other in reversed(list(zip(speeds.concurrency, gemm, gemv, strict=True))):
        if one <= other:
            break
        answer = count
    return answer


async def switch(benches: Bench, plans: Plans, speeds: Speed, progress: Progress) -> Switch:
    """Find from how many rows on a row's bits are other than alone."""
    progress("where kernels switch")
    tried = tuple(range(1, plans.usual.neighbours + 2))
    differs: dict[str, int | None] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for policy, bench in benches.items():
        alone: tuple[bytes, ...] = ()
        seen: list[str] = []
        differs[policy] = None
        for count in tried:
            # The prompts alone first, then a few steps together: one rounding may hide in the
            # logits of its own step, but not in those that read the cache later.
            sequences = [
                (await start_sequence(bench, _prompt(bench, i, 2)))[0] for i in range(count)
            ]
            digests = []
            for token in _prompt(bench, 7, _SWITCH_STEPS):
                step = await bench.step([Row(each, (token,)) for each in sequences])
                digests.append(step.outcomes[0][0].digest)
            result = tuple(digests)
            seen.append(" ".join(step.linear_paths))
            alone = alone or result
            if result != alone and differs[policy] is None:
                differs[policy] = count
            for sequence in sequences:
                bench.release(sequence)
        paths[policy] = tuple(seen)
    return Switch(pays_from(speeds), differs, paths, tried)


async def _story(
    bench: BenchExecutor, prompt: Sequence[int], count: int, others: Sequence[Sequence[int]]
) -> list[Outcome]:
    """A greedy text after a prompt that is read alone, with `others` decoding beside it."""
    subject, first = await start_sequence(bench, prompt)
    outcomes = [first]
    company = [await start_sequence(bench, each) for each in others]
    sequences = [subject, *(each for each, _ in company)]
    tokens = [first.token_id, *(outcome.token_id for _, outcome in company)]
    while len(outcomes) < count:
        rows = [Row(each, (token,)) for each, token in zip(sequences, tokens, strict=True)]
        step = await bench.step(rows)
        outcomes.append(step.outcomes[0][0])
        tokens = [outcome[0].token_id for outcome in step.outcomes]
    for sequence in sequences:
        bench.release(sequence)
    return outcomes


def _first(pairs: Sequence[bool]) -> int | None:
    return next((index for index, differs in enumerate(pairs) if differs), None)


def compare(policy: str, index: int, alone: list[Outcome], together: list[Outcome]) -> Divergence:
    """Say where two runs of one text part."""
    pairs = list(zip(alone, together, strict=True))
    first_token = _first([one.token_id != other.token_id for one, other in pairs])
    first_digest = _first([one.digest != other.digest for one, other in pairs])
    if first_token is None:
        return Divergence(policy, index, len(pairs), first_digest, None, None, None)
    one, other = (TopTwo(each.top_ids, each.top_logits) for each in pairs[first_token])
    return Divergence(policy, index, len(pairs), first_digest, first_token, one, other)


async def divergence(
    benches: Bench, prompts: Sequence[Sequence[int]], plans: Plans, progress: Progress
) -> list[Divergence]:
    """Generate each text alone and beside neighbours, under each policy."""
    found = []
    for policy, bench in benches.items():
        progress(f"texts alone and together, policy {policy}")
        plan = plans.of(policy)
        for index, prompt in enumerate(prompts[: plan.texts]):
            others = [prompts[(index + 1 + i) % len(prompts)] for i in range(plan.neighbours)]
            alone = await _story(bench, prompt, plan.story_tokens, ())
            together = await _story(bench, prompt, plan.story_tokens, others)
            found.append(compare(policy, index, alone, together))
    return found


async def verify_case(benches: Bench, plans: Plans, progress: Progress) -> list[VerifyCase]:
    """Compare four verify rows alone with four beside a prompt in the same step."""
    plan = plans.usual
    progress(f"{_VERIFY_ROWS} verify rows beside {plan.prefill_tokens} prompt tokens")
    found = []
    for policy, bench in benches.items():
        runs = []
        for has_company in (False, True):
            subject, _ = await start_sequence(bench, _prompt(bench, 3, 2))
            rows = [Row(subject, _prompt(bench, 4, _VERIFY_ROWS), wants_all=True)]
            other = await bench.open()
            if has_company:
                rows.append(Row(other, _prompt(bench, 5, plan.prefill_tokens)))
            step = await bench.step(rows)
            later = [
                (await bench.step([Row(subject, (token,))])).outcomes[0][0].digest
                for token in _prompt(bench, 6, plan.later_tokens)
            ]
            cache = (await bench.kv_digests(subject))[: 2 + _VERIFY_ROWS]
            runs.append(([each.digest for each in step.outcomes[0]], cache, later))
            bench.release(subject)
            bench.release(other)
        verify, cache_pair, later_pair = (
            [one != other for one, other in zip(*each, strict=True)]
            for each in zip(*runs, strict=True)
        )
        found.append(
            VerifyCase(
                policy=policy,
                step_tokens=_VERIFY_ROWS + plan.prefill_tokens,
                verify_logits_differ=sum(verify),
                kv_positions_differ=sum(cache_pair) if cache_pair else None,
                later_logits_differ=sum(later_pair),
                later_tokens=len(later_pair),
            )
        )
    return found
