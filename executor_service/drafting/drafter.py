"""Drafts tokens of many sequences at once, greedily, with a model and a cache of its own.

For each sequence the drafter keeps which tokens its cache holds: known ones, and behind them those
that it drafted last. A row carries known tokens; as far as they are what was drafted, they are
computed already, and the rest is caught up with in one pass for all rows. Then each further pass
gives every row that goes on one more token.

Nothing here can harm the target: a full cache means fewer drafts, and a fault ends drafting for the
sequences that had part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executor_service import logs
from executor_service.drafting.request import DraftAnswer, DraftedRow, DraftOutcome, check_draft
from isobatch_kernels.greedy import GreedyRow, greedy_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor_service.drafting.request import DraftLimits, DraftRow
    from executor_service.kv_cache.manager import KvCacheManager
    from isobatch_kernels.step import Backend

_LOG = logs.get_logger(__name__)


@dataclass(slots=True)
class DraftCounts:
    """What was done so far."""

    requests: int = 0
    passes: int = 0
    # Known tokens that were computed, and tokens that were drafted.
    tokens_caught_up: int = 0
    tokens_drafted: int = 0
    rows_without_capacity: int = 0
    failed_sequences: int = 0
    nanoseconds: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    generation: int
    # By position: what the cache holds. The first `num_known` are known, the others drafted.
    tokens: list[int] = field(default_factory=list)
    num_known: int = 0
    is_failed: bool = False


@dataclass(slots=True, eq=False)
class _Row:
    """A row in work."""

    sequence_id: int
    sequence: _Sequence
    outcome: DraftOutcome
    num_known: int = 0  # once it is computed
    work: GreedyRow | None = None  # None where nothing is to be computed


class Drafter:
    """The draft model's sequences. Used on the engine thread."""

    def __init__(
        self,
        backend: Backend,
        cache: KvCacheManager,
        limits: DraftLimits,
        *,
        num_ids: int,
        vocab_size: int,
        context_length: int,
    ) -> None:
        """Draft with `backend` over `cache`, whose sequences are the drafter's alone.

        Ids from `num_ids` on are never drafted: they are padding of one of the two models. The
        draft model itself knows `vocab_size` ids and `context_length` positions.
        """
        self.limits = limits
        self.counts = DraftCounts()
        self._passes = greedy_passes(backend)
        self._cache = cache
        self._num_ids = num_ids
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._sequences: dict[int, _Sequence] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences that something is kept of."""
        return len(self._sequences)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Let go of sequences; unknown ones are ignored."""
        known = [each for each in sequence_ids if self._sequences.pop(each, None) is not None]
        if known:
            self._cache.release(known)

    def release_all(self) -> None:
        """Let go of every sequence."""
        self.release(list(self._sequences))

    def check_integrity(self) -> None:
        """Raise AssertionError when sequences and cache disagree."""
        self._cache.check_integrity()
        if self._cache.num_sequences != len(self._sequences):
            raise AssertionError("[draft] the cache and the drafter hold different sequences")

    def draft(
        self, request: Sequence[DraftRow], is_open: Callable[[int, int], bool]
    ) -> DraftAnswer:
        """Draft for the rows of a request; raises InvalidRequestError for a malformed one.

        `is_open` tells whether the target has a sequence of that id and generation: nothing is kept
        of others, because nobody would release it.
        """
        check_draft(request, self.limits)
        self.counts.requests += 1
        rows: list[_Row] = []
        for asked in request:
            sequence_id, generation = asked.sequence_id, asked.generation
            if not is_open(sequence_id, generation):
                rows.append(_Row(sequence_id, _Sequence(generation), DraftOutcome.FAILED))
                continue
            row = _Row(sequence_id, self._sequence(sequence_id, generation), DraftOutcome.COMPUTED)
            row.outcome = self._begin(row, asked)
            rows.append(row)
        nanoseconds = 0
        try:
            nanoseconds = self._run(rows)
        except Exception as error:  # the target goes on whatever happens here
            _LOG.exception("drafting failed", error=f"{type(error).__name__}: {error}")
            for row in rows:
                if row.outcome is DraftOutcome.COMPUTED:
                    self._fail(row)
        answer = DraftAnswer([_drafted(row) for row in rows], nanoseconds)
        self.counts.tokens_drafted += sum(len(row.token_ids) for row in answer.rows)
        return answer

    def _sequence(self, sequence_id: int, generation: int) -> _Sequence:
        known = self._sequences.get(sequence_id)
        if known is None or known.generation != generation:
            self.release([sequence_id])
            self._cache.open(sequence_id)
            known = self._sequences[sequence_id] = _Sequence(generation)
        return known

    def _begin(self, row: _Row, asked: DraftRow) -> DraftOutcome:
        """Prepare a row's passes, with room for all its tokens."""
        sequence, start, carried = row.sequence, asked.start_position, asked.token_ids
        if sequence.is_failed:
            return DraftOutcome.FAILED
        if start > sequence.num_known:
            return DraftOutcome.BEHIND
        end = start + len(carried)
        if end > self._context_length or max(carried) >= self._vocab_size:
            self._fail(row)
            return DraftOutcome.FAILED
        # The last drafted token is not computed.
        max_drafts = min(asked.max_drafts, self._context_length - end + 1)
        grow = self._cache.grow
        if not grow({row.sequence_id: end + max(0, max_drafts - 1)}):
            max_drafts = min(max_drafts, 1)
            if not grow({row.sequence_id: end}):
                self.counts.rows_without_capacity += 1
                return DraftOutcome.NO_CAPACITY
        held = sequence.tokens[start:end]
        same = next(
            (i for i, (a, b) in enumerate(zip(held, carried, strict=False)) if a != b), len(held)
        )
        if max_drafts and same == len(carried):
            same -= 1  # drafts follow from the logits of the last known token
        del sequence.tokens[start + same :]
        sequence.num_known = min(sequence.num_known, start + same)
        row.num_known = end
        if same < len(carried):
            row.work = GreedyRow(carried[same:], start + same, max_drafts, asked.min_confidence)
        return DraftOutcome.COMPUTED

    def _run(self, rows: Sequence[_Row]) -> int:
        """Compute what is to be computed; return the nanoseconds of its passes."""
        computed: list[tuple[_Row, GreedyRow]] = []
        for row in rows:
            if row.work is not None:
                computed.append((row, row.work))
            elif row.outcome is DraftOutcome.COMPUTED:
                row.sequence.num_known = row.num_known
        if not computed:
            return 0
        counts = self.counts
        counts.tokens_caught_up += sum(len(work.token_ids) for _, work in computed)
        tables = self._cache.block_tables([row.sequence_id for row, _ in computed])
        works = [work for _, work in computed]
        nanoseconds, passes = self._passes(works, tables, self._num_ids)
        counts.passes += passes
        counts.nanoseconds += nanoseconds
        for row, work in computed:
            if not work.is_finite:
                self._fail(row)
                continue
            # Each pass but the first has computed the draft of the one before it.
            row.sequence.tokens += [*work.token_ids, *work.drafts[: work.num_passes - 1]]
            row.sequence.num_known = row.num_known
        return nanoseconds

    def _fail(self, row: _Row) -> None:
        """End drafting for a row's sequence and free its blocks."""
        sequence = row.sequence
        row.outcome = DraftOutcome.FAILED
        row.work = None
        if sequence.is_failed or self._sequences.get(row.sequence_id) is not sequence:
            return
        self.counts.failed_sequences += 1
        sequence.is_failed, sequence.tokens, sequence.num_known = True, [], 0
        self._cache.release([row.sequence_id])
        self._cache.open(row.sequence_id)


def _drafted(row: _Row) -> DraftedRow:
    known, work = row.sequence.num_known, row.work
    if work is None:
        return DraftedRow(row.outcome, known)
    return DraftedRow(row.outcome, known, work.drafts, work.confidences)
