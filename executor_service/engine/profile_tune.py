"""Times the ways in which a backend can compute steps of so many rows, and takes the fastest."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from executor_service import logs
from executor_service.engine.profile import StepShape
from isobatch_kernels.tuning import Proposing, Tunable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor_service.engine.profile_steps import Clock, Steps
    from executor_service.engine.step_request import Limits

# A part of what a first start may take longer.
BUDGET_NS: Final = 300_000_000
REPEATS: Final = 5
# Row counts that are compared; those between two of them follow the larger.
ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
# Rows up to here come from decoding, more of them from prompts.
_MOST_DECODE_ROWS: Final = 32
# What another way must gain over the default: less than that is noise.
GAIN: Final = 0.04
_LOG = logs.get_logger(__name__)


def tune(
    backend: object,
    steps: Steps,
    limits: Limits,
    clock: Clock,
    budget_ns: int = BUDGET_NS,
) -> dict[int, str]:
    """Compare what a backend offers, and let it use the best; returns its choices by most rows.

    Empty where it offers nothing, or nothing is faster than the defaults. Row counts that no longer
    fit into the budget keep the default.
    """
    if not isinstance(backend, Tunable):
        return {}
    try:
        found = _compare(backend, steps, limits, clock, budget_ns)
    except BaseException:
        backend.choose({})
        raise
    if all(name == backend.choices(rows)[0] for rows, name in found.items()):
        found = {}
    backend.choose(found)
    return found


def _compare(
    backend: Tunable, steps: Steps, limits: Limits, clock: Clock, budget_ns: int
) -> dict[int, str]:
    begin = clock()
    found: dict[int, str] = {}
    one = StepShape(1, 1)
    if not steps.take(one):
        return {}
    steps.run(one)
    last_ns = clock() - begin
    for rows in ROWS:
        shape = _shape(rows)
        names = backend.choices(rows)
        if rows > min(limits.max_num_batched_tokens, limits.context_length):
            break
        if len(names) < 2 or shape.num_rows > limits.max_num_seqs:
            continue
        # A few more rows may take twice as long; the first step of each way does not count.
        ways = len(names) + isinstance(backend, Proposing)
        expected = 2 * last_ns * ways * (REPEATS + 1)
        if clock() - begin + expected > budget_ns or not steps.take(shape):
            break
        if isinstance(backend, Proposing):
            names = list(dict.fromkeys((*names, backend.propose(rows, clock))))
        durations: dict[str, list[int]] = {name: [] for name in names}
        for repeat in range(REPEATS + 1):
            for name in names:
                backend.choose({rows: name})
                started = clock()
                steps.run(shape)
                if repeat:
                    durations[name].append(clock() - started)
        found[rows] = fastest(durations, names[0])
        last_ns = min(map(min, durations.values()))
    return found


def _shape(rows: int) -> StepShape:
    return StepShape(rows if rows <= _MOST_DECODE_ROWS else 1, rows)


def fastest(durations: Mapping[str, Sequence[int]], default: str) -> str:
    """Return the name with the least median, if it beats the default clearly, also at its best."""
    medians = {name: statistics.median(found) for name, found in durations.items()}
    name = min(medians, key=lambda each: medians[each])
    is_clear = (
        medians[name] < medians[default] * (1 - GAIN)
        and min(durations[name]) < min(durations[default])
    )  # fmt: skip
    return name if is_clear else default


def apply_choices(backend: object, choices: Mapping[int, str]) -> None:
    """Let a backend use stored choices; one that does not know them keeps its defaults."""
    if not choices or not isinstance(backend, Tunable):
        return
    try:
        backend.choose(choices)
    except ValueError as error:
        _LOG.warning("choices of the stored profile are not known", error=str(error))
