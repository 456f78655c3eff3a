"""The outbox of one request: tokens come in step by step, messages go out as the reader allows.

Nothing here blocks the step loop. What a slow reader has not taken yet is merged into one
pending delta, so an outbox never holds more than the request's own output; `slow_readers` bounds
how far a request gets ahead of its reader.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_service.core import FinishReason, Request
from scheduler_service.errors import ServiceError
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher
from scheduler_service.tracing.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that the reader has not seen, and the text that they completed."""

    # Index of the first token in the output.
    start_index: int
    token_ids: tuple[int, ...]
    text: str
    # One 16-byte digest for each token, or none at all.
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    reason: FinishReason
    # Text held back until the end.
    text: str
    stop_string: str
    stop_token_id: int | None
    # Monotonic time in seconds.
    time: float


class TokenStream:
    """The outbox of one request."""

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        wants_digests: bool = False,
    ) -> None:
        """Hold the output of `request`; its text ends before the first of `stops`."""
        self.request = request
        self.wants_digests = wants_digests
        # Writes the request's trace, where one was asked for.
        self.recorder: Recorder | None = None
        # Monotonic times in seconds; None until they happen.
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ending: Ending | None = None
        self.error: ServiceError | None = None
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        # Called whenever there is something to take.
        self.on_ready: Callable[[], None] | None = None
        # Called when the reader has taken everything that was pending.
        self.on_drained: Callable[[], None] | None = None
        self._num_taken = 0
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._digests: list[bytes] = []

    @property
    def is_over(self) -> bool:
        """True once the request has ended, well or badly."""
        return self._ended.is_set()

    @property
    def num_pending(self) -> int:
        """Tokens that the reader has not taken."""
        return len(self._token_ids)

    @property
    def has_stopped(self) -> bool:
        """True once the text holds a stop string: no token after it counts."""
        return self._stops.matched is not None

    def push_token(self, token_id: int, now: float, digest: bytes | None = None) -> bool:
        """Add the next token; return True when its text completes a stop string."""
        if self.is_over:
            return False
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self._token_ids.append(token_id)
        self._texts.append(self._stops.feed(self._detokenizer.feed(token_id)))
        if self.wants_digests and digest is not None:
            self._digests.append(digest)
        self._set_ready()
        return self._stops.matched is not None

    def take_trace(self) -> bytes:
        """Return the pieces of the request's trace that were not taken yet."""
        return b"" if self.recorder is None else self.recorder.take()

    def finish(self, reason: FinishReason, now: float, stop_token_id: int | None = None) -> None:
        """End the stream; a stop string in the last token wins over `reason`."""
        if self.is_over:
            return
        text = self._stops.feed(self._detokenizer.finish())
        stop = self._stops.matched
        if stop is None:
            text += self._stops.finish()
        else:
            reason, stop_token_id = FinishReason.STOP, None
        self.ending = Ending(reason, text, stop or "", stop_token_id, now)
        self._close()

    def fail(self, error: ServiceError) -> None:
        """End the stream with an error."""
        if not self.is_over:
            self.error = error
            self._close()

    def _set_ready(self) -> None:
        self._ready.set()
        if self.on_ready is not None:
            self.on_ready()

    def _close(self) -> None:
        self._ended.set()
        self._set_ready()

    async def wait(self, linger_seconds: float = 0.0) -> None:
        """Return when there is something to take or the stream is over.

        With `linger_seconds`, tokens after the first wait that long for others to join them.
        """
        await self._ready.wait()
        if linger_seconds > 0 and self._num_taken and not self.is_over:
            try:
                async with asyncio.timeout(linger_seconds):
                    await self._ended.wait()
            except TimeoutError:
                return

    def take(self) -> Delta | None:
        """Return everything pending, or None."""
        if not self._token_ids:
            return None
        delta = Delta(
            self._num_taken, tuple(self._token_ids), "".join(self._texts), tuple(self._digests)
        )
        self._num_taken += len(self._token_ids)
        self._token_ids.clear()
        self._texts.clear()
        self._digests.clear()
        if not self.is_over:
            self._ready.clear()
        if self.on_drained is not None:
            self.on_drained()
        return delta
