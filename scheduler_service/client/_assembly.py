"""Folds the events of a stream into an answer, and checks them against the contract."""

from __future__ import annotations

from scheduler_service.client._errors import ProtocolError, RequestCancelledError
from scheduler_service.client._models import Accepted, Completion, Event, Finished, TokenEvent


class Assembly:
    """State of one stream: what was accepted, which tokens came, and how it ended."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._digests: list[bytes] = []
        self._trace: list[bytes] = []

    @property
    def has_output(self) -> bool:
        """True once a token came or the stream ended: from then on it cannot be tried again."""
        return bool(self._texts)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def fold(self, event: Event) -> Event | None:
        """Take an event and return it, or None for an Accepted that repeats after a retry.

        Raises ProtocolError for an event out of order or a gap in the tokens.
        """
        if self.finished is not None:
            raise ProtocolError(
                f"[generate] Finished must be the last event, got {type(event).__name__}"
            )
        if isinstance(event, Accepted):
            if self._token_ids:
                raise ProtocolError("[generate] Accepted must come before tokens, got it after")
            is_repeat = self.accepted is not None
            self.accepted = event
            self._trace = [event.trace]
            return None if is_repeat else event
        if self.accepted is None:
            raise ProtocolError(
                f"[generate] Accepted must be the first event, got {type(event).__name__}"
            )
        if isinstance(event, TokenEvent):
            if event.start_index != len(self._token_ids):
                raise ProtocolError(
                    f"[generate] tokens must be contiguous: start_index must be "
                    f"{len(self._token_ids)}, got {event.start_index}"
                )
            self._token_ids.extend(event.token_ids)
            self._digests.extend(event.logits_digests)
        else:
            self.finished = event
        self._texts.append(event.text)
        self._trace.append(event.trace)
        return event

    def check_ended(self) -> None:
        """Raise ProtocolError when the stream closed without Finished."""
        if self.finished is None:
            raise ProtocolError("[generate] a stream must end with Finished, got its end without")

    def completion(self) -> Completion:
        """Return the whole answer; raises RequestCancelledError for a stream closed early."""
        accepted, finished = self.accepted, self.finished
        if accepted is None or finished is None:
            raise RequestCancelledError(
                f"[generate] the answer must be whole, got {len(self._token_ids)} tokens "
                "of a stream that was closed"
            )
        return Completion(
            request_id=accepted.request_id,
            model=accepted.model,
            text=self.text,
            token_ids=tuple(self._token_ids),
            finish_reason=finished.reason,
            stop_string=finished.stop_string,
            stop_token_id=finished.stop_token_id,
            seed=accepted.seed,
            numeric_class=accepted.numeric_class,
            usage=finished.usage,
            timings=finished.timings,
            num_preemptions=finished.num_preemptions,
            logits_digests=tuple(self._digests),
            trace=b"".join(self._trace),
        )
