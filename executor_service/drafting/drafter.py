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
from typing import TYPE_CHECKING, Final

import numpy as np

from executor_service import logs
from executor_service.drafting.request import DraftAnswer, DraftOutcome, check_draft
from isobatch_kernels.step import Stat, StepInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor_service.drafting.request import DraftLimits, DraftRequest
    from executor_service.kv_cache.manager import KvCacheManager
    from isobatch_kernels.step import Backend

_STATISTICS: Final = np.uint32(Stat.ARGMAX | Stat.NORMALIZER)
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
    max_drafts: int = 0
    min_confidence: float = 0.0
    # Tokens of the coming pass.
    coming: list[int] = field(default_factory=list)
    num_known: int = 0  # once that pass is done
    drafts: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    product: float = 1.0

    @property
    def wants_more(self) -> bool:
        return len(self.drafts) < self.max_drafts and self.product >= self.min_confidence


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
        self._backend = backend
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

    def draft(self, request: DraftRequest, is_open: Callable[[int, int], bool]) -> DraftAnswer:
        """Draft for the rows of a request; raises InvalidRequestError for a malformed one.

        `is_open` tells whether the target has a sequence of that id and generation: nothing is kept
        of others, because nobody would release it.
        """
        check_draft(request, self.limits)
        self.counts.requests += 1
        rows: list[_Row] = []
        stops = np.cumsum(request.num_tokens).tolist()
        token_ids = request.token_ids.tolist()
        for index, (sequence_id, generation, start, stop) in enumerate(
            zip(
                request.sequence_ids.tolist(),
                request.generations.tolist(),
                request.start_positions.tolist(),
                stops,
                strict=True,
            )
        ):
            if not is_open(sequence_id, generation):
                rows.append(_Row(sequence_id, _Sequence(generation), DraftOutcome.FAILED))
                continue
            row = _Row(sequence_id, self._sequence(sequence_id, generation), DraftOutcome.COMPUTED)
            row.min_confidence = float(request.min_confidences[index])
            carried = token_ids[stop - int(request.num_tokens[index]) : stop]
            row.outcome = self._begin(row, start, carried, int(request.max_drafts[index]))
            rows.append(row)
        nanoseconds = 0
        try:
            nanoseconds = self._run(rows)
        except Exception as error:  # the target goes on whatever happens here
            _LOG.exception("drafting failed", error=f"{type(error).__name__}: {error}")
            for row in rows:
                if row.outcome is DraftOutcome.COMPUTED:
                    self._fail(row)
        self.counts.tokens_drafted += sum(len(row.drafts) for row in rows)
        return _answer(rows, nanoseconds)

    def _sequence(self, sequence_id: int, generation: int) -> _Sequence:
        known = self._sequences.get(sequence_id)
        if known is None or known.generation != generation:
            self.release([sequence_id])
            self._cache.open(sequence_id)
            known = self._sequences[sequence_id] = _Sequence(generation)
        return known

    def _begin(self, row: _Row, start: int, carried: list[int], max_drafts: int) -> DraftOutcome:
        """Prepare a row's first pass, with room for all its tokens."""
        sequence = row.sequence
        if sequence.is_failed:
            return DraftOutcome.FAILED
        if start > sequence.num_known:
            return DraftOutcome.BEHIND
        end = start + len(carried)
        if end > self._context_length or max(carried) >= self._vocab_size:
            self._fail(row)
            return DraftOutcome.FAILED
        # The last drafted token is not computed.
        max_drafts = min(max_drafts, self._context_length - end + 1)
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
        row.coming, row.num_known, row.max_drafts = carried[same:], end, max_drafts
        return DraftOutcome.COMPUTED

    def _run(self, rows: Sequence[_Row]) -> int:
        """Run passes until no row wants more; return their nanoseconds."""
        live = [row for row in rows if row.outcome is DraftOutcome.COMPUTED]
        for row in live:
            if not row.coming:
                row.sequence.num_known = row.num_known
        live = [row for row in live if row.coming]
        self.counts.tokens_caught_up += sum(len(row.coming) for row in live)
        nanoseconds = 0
        while live:
            nanoseconds += self._pass(live)
            live = [row for row in live if row.coming]
        self.counts.nanoseconds += nanoseconds
        return nanoseconds

    def _pass(self, rows: Sequence[_Row]) -> int:
        """Compute the coming tokens of all rows; then each has its next draft or is over."""
        asking = [row for row in rows if row.max_drafts]
        output = self._backend.run(self._step_input(rows))
        self.counts.passes += 1
        argmax, totals = output.argmax_ids.tolist(), output.normalizers.tolist()
        chosen = {id(row): index for index, row in enumerate(asking)}
        for row, bad_op in zip(rows, output.non_finite_ops.tolist(), strict=True):
            if bad_op >= 0:
                self._fail(row)
                continue
            sequence = row.sequence
            sequence.tokens += row.coming
            sequence.num_known = row.num_known
            row.coming = []
            index = chosen.get(id(row))
            # Padding of one of the models is no token.
            if index is None or argmax[index] >= self._num_ids:
                continue
            confidence = 1.0 / totals[index]
            row.drafts.append(argmax[index])
            row.confidences.append(confidence)
            row.product *= confidence
            if row.wants_more:
                row.coming = [argmax[index]]
        return output.forward_ns + output.statistics_ns

    def _step_input(self, rows: Sequence[_Row]) -> StepInput:
        lengths = np.array([len(row.coming) for row in rows], np.int32)
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        starts = np.array([len(row.sequence.tokens) for row in rows], np.int32)
        offsets = np.repeat(starts - query_start_loc[:-1], lengths)
        wanted = query_start_loc[1:][[bool(row.max_drafts) for row in rows]] - np.int32(1)
        num_tokens, num_wanted = int(query_start_loc[-1]), len(wanted)
        return StepInput(
            token_ids=np.array([token for row in rows for token in row.coming], np.int32),
            positions=(np.arange(num_tokens, dtype=np.int32) + offsets).astype(np.int32),
            query_start_loc=query_start_loc,
            block_tables=self._cache.block_tables([row.sequence_id for row in rows]),
            wanted=wanted.astype(np.int32),
            statistics=np.full(num_wanted, _STATISTICS),
            top_k=np.zeros(num_wanted, np.int32),
            inverse_temperatures=np.ones(num_wanted, np.float32),
            quantiles=np.zeros(num_wanted, np.float32),
            edit_starts=np.zeros(num_wanted + 1, np.int32),
            edit_ids=np.zeros(0, np.int32),
            edit_values=np.zeros(0, np.float32),
        )

    def _fail(self, row: _Row) -> None:
        """End drafting for a row's sequence and free its blocks."""
        sequence = row.sequence
        row.outcome = DraftOutcome.FAILED
        row.coming, row.drafts, row.confidences = [], [], []
        if sequence.is_failed or self._sequences.get(row.sequence_id) is not sequence:
            return
        self.counts.failed_sequences += 1
        sequence.is_failed, sequence.tokens, sequence.num_known = True, [], 0
        self._cache.release([row.sequence_id])
        self._cache.open(row.sequence_id)


def _answer(rows: Sequence[_Row], nanoseconds: int) -> DraftAnswer:
    return DraftAnswer(
        outcomes=np.array([row.outcome for row in rows], np.uint8),
        num_computed=np.array([row.sequence.num_known for row in rows], np.int32),
        num_drafts=np.array([len(row.drafts) for row in rows], np.int32),
        token_ids=np.array([token for row in rows for token in row.drafts], np.int32),
        confidences=np.array([each for row in rows for each in row.confidences], np.float32),
        forward_ns=nanoseconds,
    )
