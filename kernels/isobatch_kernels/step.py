"""What a backend takes and gives for one step. Plain arrays; no policy, no protobuf."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


def _no_sources() -> Int32:
    return np.zeros(0, np.int32)


class Stat(enum.IntFlag):
    """Statistics of a wanted position; the values are those of the contract's Statistic enum."""

    ARGMAX = 1
    TOP_K = 2
    NORMALIZER = 4
    QUANTILE = 8
    NAMED = 16
    FULL_ROW = 32
    DIGEST = 64


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step of S token rows, T tokens and L wanted positions."""

    token_ids: Int32  # (T,)
    positions: Int32  # (T,) absolute
    query_start_loc: Int32  # (S + 1,) prefix sums of row lengths
    block_tables: Int32  # (S, max_blocks) block ids, -1 past the end
    wanted: Int32  # (L,) indexes into T, ascending
    statistics: npt.NDArray[np.uint32]  # (L,) Stat bits
    top_k: Int32  # (L,)
    inverse_temperatures: Float32  # (L,)
    quantiles: Float32  # (L,)
    edit_starts: Int32  # (L + 1,)
    edit_ids: Int32  # (num_edits,)
    edit_values: Float32  # (num_edits,)
    # (T,), or empty for none. -1: the token id is literal. Else the index of a wanted position of
    # the step that was submitted immediately before: the token chosen there is this one, and its
    # place in `token_ids` holds a 0. Chosen is the quantile's token where QUANTILE was asked for,
    # else the argmax; where that row was not finite, any token id.
    token_sources: Int32 = field(default_factory=_no_sources)


class PathCount(NamedTuple):
    """Dispatches of one kernel path in a step."""

    # embed, norm_quantize, quantize, linear, rope_write_kv, paged_attention, gate_quantize or
    # row_statistics
    op: str
    path: str  # gemv, gemv_multi, gemm, attention_decode, attention_prefill, other
    unit: str  # scalar, avx2, vnni, amx, neon, metal, cuda
    dispatches: int
    rows: int  # over all dispatches


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step. Arrays stay valid until the backend's next run."""

    logits: Float32  # (L, vocab_size) after edits
    argmax_ids: Int32  # (L,)
    max_logits: Float32  # (L,)
    normalizers: Float32  # (L,) 0 where not asked
    quantile_ids: Int32  # (L,) -1 where not asked
    top_k_starts: Int32  # (L + 1,)
    top_k_ids: Int32
    top_k_logits: Float32
    top_k_weights: Float32
    non_finite_ops: (
        Int32  # (S,) index of the first op that met a non-finite value in the row, else -1
    )
    forward_ns: int
    statistics_ns: int
    paths: Sequence[PathCount]


class PendingStep(Protocol):
    """A submitted step that was not finished yet."""

    @property
    def is_running(self) -> bool:
        """Whether it is computed without waiting for `finish`, so that the next may be submitted.

        False where `finish` is what computes it.
        """
        ...

    def finish(self) -> StepOutput:
        """Waits for the results; called once, and in the order of submission.

        Raises ValueError for a malformed step that `submit` did not find, before anything is
        written.
        """
        ...


class Backend(Protocol):
    """Runs one Program over one paged key/value cache.

    At most two steps are submitted and not finished at a time. Blocks are cleared, read and
    written between steps, or, while a step runs, where it does not use them.
    """

    @property
    def unit(self) -> str:
        """Instruction set or device in use."""
        ...

    @property
    def rope_digest(self) -> str:
        """Digest of the RoPE table (rope_table.rope_digest)."""
        ...

    def submit(self, step: StepInput) -> PendingStep:
        """Begins a step. Raises ValueError for a malformed one, before anything is written."""
        ...

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step: `submit(step).finish()`."""
        ...

    def zero_blocks(self, block_ids: Int32) -> None:
        """Clears keys and values of blocks, in every layer."""
        ...

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Contents of a block: to keep elsewhere, for tests and digests.

        (num_layers, 2, num_kv_heads, block_size, head_dim) fp16 bits, keys then values.
        """
        ...

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Puts contents back that `read_block` gave, perhaps another process's of the same class.

        Raises ValueError for another shape or block.
        """
        ...

    def close(self) -> None:
        """Stops threads and frees memory."""
        ...
