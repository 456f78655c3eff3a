"""The simulated service: its limits, and how many clients it is made to bear."""

from __future__ import annotations

from typing import Final

from scheduler_service.core import Limits
from scheduler_service.core.cost_curve import NO_CURVE, CostCurve
from tests.bench.simulation.machine import Machine
from tests.bench.simulation.workload import Workload

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 8192
CONTEXT_LENGTH: Final = 8192
MAX_NUM_SEQS: Final = 64
# Where prompts come in one piece, a step must hold the longest.
WHOLE_STEP_TOKENS: Final = CONTEXT_LENGTH
# The executor's default.
STEP_TOKENS: Final = 512
_PIECE: Final = 256
_DECODE_ROWS: Final = 16


def limits(step_tokens: int, curve: CostCurve = NO_CURVE, max_step_seconds: float = 0.0) -> Limits:
    """Return the bounds of a policy whose steps hold so many tokens.

    One that knows the curve derives the seconds of a step from it, unless they are given.
    """
    return Limits(
        max_num_batched_tokens=step_tokens,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_waiting=1_000_000,
        max_waiting_tokens=1_000_000_000,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        context_length=CONTEXT_LENGTH,
        max_prefill_chunk=step_tokens,
        max_step_seconds=max_step_seconds,
        cost_curve=curve,
    )


def work_seconds(workload: Workload, machine: Machine) -> float:
    """Return what the workload costs a machine that is well used: the load is measured by it.

    Prompts in pieces of 256 tokens, answers 16 at a time; what a chat has said before and the
    system prompts are in the cache.
    """
    total = 0.0
    seen: set[int] = set()
    for conversation in workload:
        known = conversation.num_system
        if conversation.system in seen or not known:
            cached = known
        else:
            cached = 0
            seen.add(conversation.system)
        for turn in conversation.turns:
            length = known + turn.num_new
            for start in range(cached, length, _PIECE):
                total += machine.seconds([(min(_PIECE, length - start), start)])
            together = machine.seconds([(1, length + turn.num_answer // 2)] * _DECODE_ROWS)
            total += turn.num_answer * together / _DECODE_ROWS
            known = cached = length + turn.num_answer
    return total


def rate_for(workload: Workload, machine: Machine, load: float) -> float:
    """Return the clients a second with which the machine is busy for `load` of the time."""
    return load * len(workload) / work_seconds(workload, machine)
