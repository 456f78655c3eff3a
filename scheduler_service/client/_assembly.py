"""Folds the events of a stream into answers, and checks them against the contract."""

from __future__ import annotations

from scheduler_service.client._errors import ProtocolError, RequestCancelledError
from scheduler_service.client._models import Accepted, Completion, Event, Finished, TokenEvent

_SEED_MODULUS = 2**64


class _Sample:
    """State of one answer."""

    def __init__(self) -> None:
        self.finished: Finished | None = None
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.digests: list[bytes] = []
        self.trace: list[bytes] = []

    def fold(self, event: TokenEvent | Finished) -> None:
        if self.finished is not None:
            raise ProtocolError(
                f"[generate] Finished must be the last event, got {type(event).__name__}"
            )
        if isinstance(event, TokenEvent):
            if event.start_index != len(self.token_ids):
                raise ProtocolError(
                    f"[generate] tokens must be contiguous: start_index must be "
                    f"{len(self.token_ids)}, got {event.start_index}"
                )
            self.token_ids.extend(event.token_ids)
            self.digests.extend(event.logits_digests)
        else:
            self.finished = event
        self.texts.append(event.text)
        self.trace.append(event.trace)


class Assembly:
    """State of one stream: what was accepted, which tokens came, and how its samples ended."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self._samples = [_Sample()]

    @property
    def has_output(self) -> bool:
        """True once a token came or a sample ended: from then on it cannot be tried again."""
        return any(sample.texts for sample in self._samples)

    @property
    def text(self) -> str:
        """The text of the first sample so far."""
        return "".join(self._samples[0].texts)

    def fold(self, event: Event) -> Event | None:
        """Take an event and return it, or None for an Accepted that repeats after a retry.

        Raises ProtocolError for an event out of order or a gap in the tokens.
        """
        if self._is_over:
            raise ProtocolError(
                f"[generate] Finished must be the last event, got {type(event).__name__}"
            )
        if isinstance(event, Accepted):
            if self.has_output:
                raise ProtocolError("[generate] Accepted must come before tokens, got it after")
            is_repeat = self.accepted is not None
            self.accepted = event
            self._samples = [_Sample() for _ in range(event.num_samples)]
            self._samples[0].trace = [event.trace]
            return None if is_repeat else event
        if self.accepted is None:
            raise ProtocolError(
                f"[generate] Accepted must be the first event, got {type(event).__name__}"
            )
        if event.sample_index >= len(self._samples):
            raise ProtocolError(
                f"[generate] sample_index must be below {len(self._samples)}, "
                f"got {event.sample_index}"
            )
        self._samples[event.sample_index].fold(event)
        return event

    @property
    def _is_over(self) -> bool:
        return all(sample.finished is not None for sample in self._samples)

    def check_ended(self) -> None:
        """Raise ProtocolError when the stream closed without Finished."""
        if not self._is_over:
            raise ProtocolError("[generate] a stream must end with Finished, got its end without")

    def completion(self) -> Completion:
        """Return the answer of the first sample.

        Raises RequestCancelledError for a stream closed early.
        """
        return self._completion(0)

    def completions(self) -> tuple[Completion, ...]:
        """Return the answers of all samples; raises as `completion` does."""
        return tuple(self._completion(index) for index in range(len(self._samples)))

    def _completion(self, index: int) -> Completion:
        sample = self._samples[index]
        accepted, finished = self.accepted, sample.finished
        if accepted is None or finished is None:
            raise RequestCancelledError(
                f"[generate] the answer must be whole, got {len(sample.token_ids)} tokens "
                "of a stream that was closed"
            )
        return Completion(
            request_id=accepted.request_id,
            model=accepted.model,
            text="".join(sample.texts),
            token_ids=tuple(sample.token_ids),
            finish_reason=finished.reason,
            stop_string=finished.stop_string,
            stop_token_id=finished.stop_token_id,
            seed=(accepted.seed + index) % _SEED_MODULUS,
            numeric_class=accepted.numeric_class,
            usage=finished.usage,
            timings=finished.timings,
            num_preemptions=finished.num_preemptions,
            logits_digests=tuple(sample.digests),
            trace=b"".join(sample.trace),
            sample_index=index,
        )
