"""Several answers to one prompt: a request of the core for each, read by one call.

Sample i draws with the call's seed plus i (modulo 2^64), so it is the answer that this seed gives
alone, and the first sample is the answer without any others. The samples have the same prompt and
salt: the first one computes it and the others find it in the prefix cache.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from scheduler_service.core import RequestId, SamplingParams
from scheduler_service.streams import Delta, TokenStream

MAX_SAMPLES = 16
_SEED_MODULUS = 2**64
_LIKE_A_SAMPLE = re.compile(r"#[0-9]+\Z")


def sample_id(request_id: RequestId, index: int) -> RequestId:
    """Return the id of a sample's request: the call's own for the first, else with `#` and index.

    No two (call, index) have the same: a call whose own id ends in `#` and a number gets `#0`.
    """
    if index or _LIKE_A_SAMPLE.search(request_id):
        return RequestId(f"{request_id}#{index}")
    return request_id


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return how a sample's tokens are drawn."""
    return replace(params, seed=(params.seed + index) % _SEED_MODULUS)


class SampleStreams:
    """The outboxes of a call's samples, read as one."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        """Read these; whoever has something is read next."""
        self.streams = tuple(streams)
        self._ready = asyncio.Event()
        if len(self.streams) > 1:
            for stream in self.streams:
                stream.on_ready = self._ready.set

    async def parts(self, linger_seconds: float) -> AsyncIterator[tuple[int, Delta | None]]:
        """Iterate over (index, what is new) of the samples; None once for each that has ended.

        With `linger_seconds`, tokens after the first wait that long for others to join them.
        Raises the ServiceError of the first sample that failed.
        """
        running = dict(enumerate(self.streams))
        is_first = True
        while running:
            if len(self.streams) == 1:
                await self.streams[0].wait(linger_seconds)
            else:
                await self._ready.wait()
                if linger_seconds > 0 and not is_first:
                    await asyncio.sleep(linger_seconds)
                # Before anything is taken: what comes meanwhile sets it again.
                self._ready.clear()
            for index, stream in list(running.items()):
                delta = stream.take()
                if delta is not None:
                    yield index, delta
                    is_first = False
                # The end of a stream comes after all that was pending when it ended.
                if stream.is_over and not stream.num_pending:
                    if stream.error is not None:
                        raise stream.error
                    del running[index]
                    yield index, None
