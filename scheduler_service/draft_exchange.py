"""Lets the executor's draft model work between two steps."""

from collections.abc import Callable
from typing import Final

from scheduler_service.core import SchedulerState
from scheduler_service.executor_client import ExecutorSession
from scheduler_service.speculation import Speculator
from scheduler_service.wire import drafts as wire

# Requests before one step: more than one only where numbers of drafts are fixed.
_MAX_ROUNDS: Final = 4096


async def ask_for_drafts(
    session: ExecutorSession,
    speculator: Speculator,
    state: SchedulerState,
    vocab_size: int,
    meanwhile: Callable[[], None],
    clock: Callable[[], float],
    *,
    goes_ahead: bool,
) -> float:
    """Ask for what the coming step's drafts need; return the seconds that it took.

    No step is in flight. `meanwhile` is called while the draft model computes: what the last step
    gave can be fanned out then, as it is otherwise while the next step runs. `goes_ahead` says
    whether steps without drafts may be sent ahead.
    """
    began = clock()
    for _ in range(_MAX_ROUNDS):
        asked = clock()
        work = speculator.ask(state, goes_ahead=goes_ahead)
        if work is None:
            break
        await session.write(wire.draft(work))
        meanwhile()
        reply = wire.read_drafted(await session.read(), work, vocab_size)
        speculator.take(work, reply, clock() - asked)
    return clock() - began
