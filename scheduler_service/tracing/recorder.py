"""Writes down one request's trace while it runs.

Pieces wait here for the client, who gets them with its tokens; where traces are kept, all of them
are. The trace is closed once the request has ended and the executor has said who wrote its cache,
or when there is nobody left to say so.
"""

import asyncio
from collections.abc import Callable

from scheduler_service.core import Request
from scheduler_service.tracing.model import (
    NO_DIGEST,
    KernelPath,
    TraceEnd,
    TraceHeader,
    TraceStep,
    chained,
)
from scheduler_service.wire import trace as wire

Saver = Callable[[str, bytes], None]
"""Takes a request's id and its whole trace."""


class Recorder:
    """The trace of one request. Runs on the event loop."""

    def __init__(self, request: Request, *, wants_kv_digests: bool = False) -> None:
        """Record `request`; `begin` comes next."""
        self.request = request
        self.wants_kv_digests = wants_kv_digests
        # Set once nothing more is written.
        self.closed = asyncio.Event()
        # True while the executor holds state of the request, whose provenance is still to come.
        self.is_held = False
        # Its generation, and the positions that its steps have computed: a row that came after the
        # end of the request is nobody's.
        self.held_generation = self.num_held_positions = 0
        self.num_bytes = 0
        self._save: Saver | None = None
        self._pending: list[bytes] = []
        self._kept: list[bytes] = []
        self._path_sets: dict[tuple[KernelPath, ...], int] = {}
        self._digests: list[bytes] = []
        self._outcome = ""

    @property
    def has_ended(self) -> bool:
        """True once the request has ended."""
        return bool(self._outcome)

    def begin(self, header: TraceHeader, save: Saver | None) -> None:
        """Write the header; a whole trace is given to `save`."""
        self._save = save
        self._add(wire.header(header))

    def step(self, value: TraceStep) -> None:
        """Write a step with a row of the request."""
        paths = value.kernel_paths
        path_set = self._path_sets.get(paths)
        if path_set is None:
            path_set = self._path_sets[paths] = len(self._path_sets)
            self._add(wire.kernel_paths(paths))
        self._add(wire.step(value, path_set))
        self._digests.extend(each.logits_digest for each in value.tokens)
        self.is_held, self.held_generation = True, value.generation
        self.num_held_positions = value.start_position + value.num_row_tokens

    def released(self, piece: bytes | None) -> None:
        """Write who wrote the cached state that is given back now; None where nobody knows."""
        if piece is not None and not self.closed.is_set():
            self._add(piece)
        self.is_held = False
        if self.has_ended:
            self._close()

    def end(self, outcome: str) -> None:
        """Write that the request has ended; the trace closes when its state is given back."""
        if not self.has_ended:
            self._outcome = outcome
            if not self.is_held:
                self._close()

    def take(self) -> bytes:
        """Return the pieces that were not taken yet."""
        pieces = b"".join(self._pending)
        self._pending.clear()
        return pieces

    def _close(self) -> None:
        if self.closed.is_set():
            return
        # A stop string may have come before the last token of its step.
        num_tokens = len(self.request.output_token_ids)
        digest = chained(NO_DIGEST, self._digests[:num_tokens])
        ending = TraceEnd(self._outcome, num_tokens, digest, self.request.num_preemptions)
        self._add(wire.end(ending))
        if self._save is not None:
            self._save(self.request.public_id, b"".join(self._kept))
        self._kept.clear()
        self.closed.set()

    def _add(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        self._pending.append(piece)
        if self._save is not None:
            self._kept.append(piece)
