"""The table of open sequences, and what may be said about them.

Runs on the engine thread. The keys and values themselves are the cache's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_service.errors import (
    InvalidStepError,
    RecordNotKeptError,
    SequenceNotOpenError,
    StaleGenerationError,
    TooManySequencesError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor_service.engine.step_request import Int32, StepRequest
    from executor_service.kv_cache.manager import KvCacheManager

# Running sequences, the ones that the next step gives back, and room for a scheduler's slack.
OPEN_SEQUENCES_PER_ROW = 4


@dataclass(slots=True, eq=False)
class SequenceState:
    """An open sequence."""

    generation: int
    num_cached_tokens: int  # at its opening
    # Positions in blocks that are, or may be, shared: no row starts before.
    num_fixed_tokens: int
    num_computed_tokens: int
    # Set when a row was not finite: the cached state must not be used again.
    non_finite_detail: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """One sequence of an Open message."""

    sequence_id: int
    generation: int
    model_id: str
    cache_salt: str
    token_ids: Int32
    max_cached_tokens: int


class OpenSequences:
    """Sequences by id."""

    def __init__(
        self,
        cache: KvCacheManager,
        max_num_seqs: int,
        on_release: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        """Keep a bounded number of sequences; `on_release` is told whoever is given back."""
        self._cache = cache
        self._on_release = on_release
        self._bound = OPEN_SEQUENCES_PER_ROW * max_num_seqs
        self._sequences: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, openings: Sequence[Opening]) -> list[int]:
        """Open sequences and return the cached positions of each; all are opened or none."""
        new = {opening.sequence_id for opening in openings} - self._sequences.keys()
        if len(self._sequences) + len(new) > self._bound:
            raise TooManySequencesError(
                f"[open] at most {self._bound} sequences may be open, "
                f"got {len(self._sequences) + len(new)}"
            )
        for opening in openings:
            known = self._sequences.get(opening.sequence_id)
            if known is not None and opening.generation < known.generation:
                raise StaleGenerationError(
                    f"[open] generation of sequence {opening.sequence_id} must be at least "
                    f"{known.generation}, got {opening.generation}"
                )
        return [self._open(opening) for opening in openings]

    def _open(self, opening: Opening) -> int:
        known = self._sequences.get(opening.sequence_id)
        if known is not None and known.generation == opening.generation:
            return known.num_cached_tokens
        self._give_back([opening.sequence_id])
        cached = self._cache.open(
            opening.sequence_id,
            opening.cache_salt,
            opening.token_ids,
            opening.max_cached_tokens,
        )
        self._sequences[opening.sequence_id] = SequenceState(
            opening.generation, cached, cached, cached
        )
        return cached

    def release(self, sequence_ids: Sequence[int]) -> None:
        """Give sequences back; unknown ones are ignored."""
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
        self._give_back(sequence_ids)

    def release_all(self) -> None:
        """Give every sequence back."""
        self.release(list(self._sequences))

    def _give_back(self, sequence_ids: Sequence[int]) -> None:
        self._cache.release(sequence_ids)
        self._on_release(sequence_ids)

    def is_open(self, sequence_id: int, generation: int) -> bool:
        """Tell whether a sequence is open in this generation."""
        known = self._sequences.get(sequence_id)
        return known is not None and known.generation == generation

    def of_rows(self, request: StepRequest) -> list[SequenceState]:
        """Return the sequences of the rows; raises when one is not open or leaves a gap."""
        sequences = []
        for sequence_id, generation, start in zip(
            request.sequence_ids.tolist(),
            request.generations.tolist(),
            request.start_positions.tolist(),
            strict=True,
        ):
            known = self._sequences.get(sequence_id)
            if known is None or known.generation != generation:
                got = "a closed one" if known is None else f"generation {known.generation}"
                raise SequenceNotOpenError(
                    f"[step] sequence {sequence_id}, generation {generation}, must be open, "
                    f"got {got}"
                )
            # A row may go back behind computed positions (a verified draft that was refused), but
            # not into blocks that others may hold.
            if not known.num_fixed_tokens <= start <= known.num_computed_tokens:
                raise InvalidStepError(
                    "row_start_positions",
                    f"of sequence {sequence_id} must be in {known.num_fixed_tokens}.."
                    f"{known.num_computed_tokens}",
                    start,
                )
            sequences.append(known)
        return sequences

    def of_generation(self, sequence_id: int, generation: int) -> SequenceState:
        """Return a sequence whose record is asked for; raises RecordNotKeptError."""
        known = self._sequences.get(sequence_id)
        if known is None or known.generation != generation:
            raise RecordNotKeptError(
                "[provenance] the sequence must be open, "
                f"got sequence {sequence_id}, generation {generation}"
            )
        return known

    def of_handle(self, sequence_id: int, handle: int) -> SequenceState:
        """Return the sequence that a handle names; raises RecordNotKeptError."""
        known = self._sequences.get(sequence_id)
        if known is None:
            raise RecordNotKeptError(
                f"[provenance] the handle must be of an open sequence, got {handle}"
            )
        return known

    def check_integrity(self) -> None:
        """Raise AssertionError when sequences and cache disagree."""
        self._cache.check_integrity()
        if self._cache.num_sequences != len(self._sequences):
            raise AssertionError("[session] the cache and the session hold different sequences")
