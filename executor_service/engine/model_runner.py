"""Runs steps of one model on a backend and keeps what later requests may ask of the last step."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from executor_service.engine.step_input import build_step_input
from executor_service.engine.step_request import RowOutcome, StepRequest, StepResults
from executor_service.errors import InvalidRequestError, LogitsNotKeptError
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from executor_service.engine.step_request import Float32, Int32, UInt32
    from isobatch_kernels.step import Backend, PendingStep, StepOutput

    Bools = npt.NDArray[np.bool_]

_Number = TypeVar("_Number", np.uint8, np.int32, np.float32)

DIGEST_BYTES = 16
# Statistics whose rows FetchLogits may ask for.
_KEPT = np.uint32(Stat.FULL_ROW | Stat.TOP_K)
# As numpy scalars: members of an enum cost a microsecond each time they are looked up.
_ARGMAX, _QUANTILE = np.uint32(Stat.ARGMAX), np.uint32(Stat.QUANTILE)
_DIGEST = np.uint32(Stat.DIGEST)
_NO_TOKEN = np.int32(-1)
_NO_LOGITS = np.zeros(0, np.float32)
_NO_LOGITS.setflags(write=False)
_COMPUTED, _NON_FINITE = np.uint8(RowOutcome.COMPUTED), np.uint8(RowOutcome.NON_FINITE)


class ModelRunner:
    """One Program on one backend."""

    def __init__(self, op_names: Sequence[str], backend: Backend) -> None:
        """Run steps on `backend`; `op_names` are the Program's, for messages.

        The Program itself is not kept: its weights live on in the backend's own format.
        """
        self._op_names = op_names
        self._backend = backend
        self._output: StepOutput | None = None
        self._request: StepRequest | None = None
        self._asked = _Asked(np.zeros(0, np.uint32))

    def run(self, request: StepRequest, token_ids: Int32, block_tables: Int32) -> StepResults:
        """Compute a checked step with at least one row."""
        return self.finish(request, self.submit(request, token_ids, block_tables))

    def submit(
        self,
        request: StepRequest,
        token_ids: Int32,
        block_tables: Int32,
        token_sources: Int32 | None = None,
    ) -> PendingStep:
        """Begin a checked step with at least one row.

        `token_sources` (T,) are those of `isobatch_kernels.step.StepInput`; None for none.
        """
        return self._backend.submit(
            build_step_input(request, token_ids, block_tables, token_sources)
        )

    def finish(self, request: StepRequest, pending: PendingStep) -> StepResults:
        """Wait for a step that was begun; steps finish in the order in which they began."""
        self.forget_logits()
        output = pending.finish()
        self._output, self._request = output, request
        asked = self._asked
        if request.statistics is not asked.statistics or request.statistics.flags.writeable:
            asked = self._asked = _Asked(request.statistics)
        bad_ops = [op for op in output.non_finite_ops.tolist() if op >= 0]
        return StepResults(
            row_outcomes=np.where(output.non_finite_ops < 0, _COMPUTED, _NON_FINITE)
            if bad_ops
            else _same(_COMPUTED, len(output.non_finite_ops)),
            non_finite_details=tuple(map(self._name, bad_ops)),
            argmax_ids=_where(asked.argmax, output.argmax_ids),
            max_logits=output.max_logits.copy(),
            quantile_ids=_where(asked.quantile, output.quantile_ids),
            normalizers=output.normalizers.copy(),
            top_k_starts=output.top_k_starts.copy(),
            top_k_ids=_kept(output.top_k_ids),
            top_k_logits=_kept(output.top_k_logits),
            top_k_weights=_kept(output.top_k_weights),
            named_logits=_named_logits(request, output.logits),
            digests=_digests(asked.digest, output.logits),
            forward_ns=output.forward_ns,
            statistics_ns=output.statistics_ns,
            paths=tuple(output.paths),
        )

    def forget_logits(self) -> None:
        """Let the last step's logits go: the backend may write over them."""
        self._output = None

    def forget(self) -> None:
        """Let everything of the last step go."""
        self._output = self._request = None

    def logits(self, step_id: int, wanted_indexes: Int32, max_bytes: int) -> bytes:
        """Return rows (len(wanted_indexes), vocab_size) fp32 of the last step, as bytes."""
        output, request = self._output, self._request
        if output is None or request is None or request.step_id != step_id:
            raise LogitsNotKeptError(f"[fetch_logits] step_id must be the last step, got {step_id}")
        num_wanted = len(request.wanted)
        if len(wanted_indexes) and not (
            wanted_indexes.min() >= 0 and wanted_indexes.max() < num_wanted
        ):
            raise InvalidRequestError(
                f"[fetch_logits] wanted_indexes must be below {num_wanted}, "
                f"got {wanted_indexes[:8].tolist()}"
            )
        num_bytes = len(wanted_indexes) * output.logits.shape[1] * 4
        if num_bytes > max_bytes:
            raise InvalidRequestError(
                f"[fetch_logits] rows must have at most {max_bytes} bytes, got {num_bytes}"
            )
        kept = request.statistics[wanted_indexes] & _KEPT
        if not kept.all():
            raise LogitsNotKeptError(
                "[fetch_logits] rows must have been asked with STATISTIC_FULL_ROW or "
                f"STATISTIC_TOP_K, got {wanted_indexes[kept == 0][:8].tolist()}"
            )
        return output.logits[wanted_indexes].astype("<f4", copy=False).tobytes()

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Return a block's fp16 bits, (num_layers, 2, num_kv_heads, block_size, head_dim)."""
        return self._backend.read_block(block_id)

    def _name(self, op: int) -> str:
        return self._op_names[op] if op < len(self._op_names) else f"op {op}"


class _Asked:
    """Which of a step's wanted positions asked for what; the next step often asks the same."""

    def __init__(self, statistics: UInt32) -> None:
        self.statistics = statistics
        self.argmax = _mask(statistics, _ARGMAX)
        self.quantile = _mask(statistics, _QUANTILE)
        self.digest = _mask(statistics, _DIGEST)


def _mask(statistics: UInt32, statistic: np.uint32) -> Bools | bool:
    """Return (L,) bool, or one for all where they agree."""
    asked = (statistics & statistic) != 0
    if asked.all():
        return True
    return asked if asked.any() else False


def _where(asked: Bools | bool, ids: Int32) -> Int32:
    """Return a copy of (L,) ids, -1 where not asked."""
    if asked is True:
        return ids.copy()
    if asked is False:
        return _same(_NO_TOKEN, len(ids))
    return np.where(asked, ids, np.int32(-1))


@functools.lru_cache(maxsize=128)
def _same(value: _Number, count: int) -> npt.NDArray[_Number]:
    """Return (count,) times the value, read-only."""
    values = np.full(count, value)
    values.setflags(write=False)
    return values


def _kept(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return values that outlive the backend's next run."""
    return values.copy() if len(values) else values


def _named_logits(request: StepRequest, logits: Float32) -> Float32:
    if not len(request.named_ids):
        return _NO_LOGITS
    rows = np.repeat(np.arange(len(request.wanted)), np.diff(request.named_starts))
    return np.asarray(logits[rows, request.named_ids], np.float32)


def _digests(asked: Bools | bool, logits: Float32) -> bytes:
    """Return BLAKE2b of each wanted position's fp32 bytes, 16 bytes; zeros where not asked."""
    if asked is False:
        return b""
    return b"".join(
        hashlib.blake2b(
            logits[index].astype("<f4", copy=False).tobytes(), digest_size=DIGEST_BYTES
        ).digest()
        if wants
        else bytes(DIGEST_BYTES)
        for index, wants in enumerate(np.broadcast_to(asked, len(logits)))
    )
