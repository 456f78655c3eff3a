"""Types of the native CPU module (sources in cpp/)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]
_QuantizedArrays = tuple[_Array, _Array, _Array | None]

source_digest: str

def unit_available(unit: str) -> bool: ...
def usable_cpus() -> int: ...

class Engine:
    def __init__(
        self,
        rope_table: npt.NDArray[np.float32],
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        context_length: int,
        attention_scale: float,
        rotary_dim: int,
        rope_interleaved: bool,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_tokens: int,
        num_threads: int,
        unit: str,
        activation_bits: int = 12,
    ) -> None: ...
    def add_buffer(self, width: int, block: int, half_sums: bool) -> int: ...
    def add_quantized(
        self, matrices: Sequence[_QuantizedArrays], bits: int, group_size: int, sub_block: int
    ) -> int: ...
    def add_dense(self, matrices: Sequence[npt.NDArray[np.uint16]], bfloat: bool) -> int: ...
    def add_op(
        self,
        kind: str,
        *,
        x: int = -1,
        out: int = -1,
        residual: int = -1,
        weights: Sequence[int] = (),
        vector: npt.NDArray[np.float32] | None = None,
        epsilon: float = 0.0,
        layer: int = 0,
        window: int = 0,
        wanted_only: bool = False,
        policy: str = "exact",
        threshold_rows: int = 0,
    ) -> None: ...
    def run(self, *arrays: _Array) -> tuple[int, int]: ...
    def draft(
        self,
        token_ids: Sequence[Sequence[int]],
        start_positions: Sequence[int],
        max_drafts: Sequence[int],
        min_confidences: Sequence[float],
        block_tables: npt.NDArray[np.int32],
        num_ids: int,
    ) -> tuple[int, int, list[tuple[list[int], list[float], int, bool]]]: ...
    def logits(self, rows: int) -> npt.NDArray[np.float32]: ...
    def zero_blocks(self, block_ids: npt.NDArray[np.int32]) -> None: ...
    def read_block(self, block_id: int, out: npt.NDArray[np.uint16]) -> None: ...
    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None: ...
    def set_panel_limits(self, limits: Sequence[tuple[int, int]]) -> None: ...
    def set_flush_subnormals(self, flush: bool) -> None: ...
    @property
    def num_threads(self) -> int: ...

class LinearLayer:
    @staticmethod
    def quantized(
        unit: str,
        packed: _Array,
        scales: _Array,
        biases: _Array | None,
        bits: int,
        group_size: int,
        activation_block: int,
        activation_bits: int = 12,
    ) -> LinearLayer: ...
    @staticmethod
    def dense(unit: str, values: npt.NDArray[np.uint16], bfloat: bool) -> LinearLayer: ...
    def forward(
        self,
        x: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        finite: npt.NDArray[np.bool_],
        bias: npt.NDArray[np.float32] | None = None,
        residual: npt.NDArray[np.float32] | None = None,
        flush_subnormals: bool = False,
    ) -> None: ...
    def embed(self, id: int, x: npt.NDArray[np.float32]) -> None: ...

class FloatLayer:
    @staticmethod
    def quantized(
        unit: str,
        packed: _Array,
        scales: _Array,
        biases: _Array | None,
        bits: int,
        group_size: int,
    ) -> FloatLayer: ...
    @staticmethod
    def dense(unit: str, values: npt.NDArray[np.uint16], bfloat: bool) -> FloatLayer: ...
    def forward(
        self,
        x: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        finite: npt.NDArray[np.bool_],
        *,
        gemv: bool,
        bias: npt.NDArray[np.float32] | None = None,
        residual: npt.NDArray[np.float32] | None = None,
    ) -> None: ...

# Scalar definitions and row operations on arrays, for tests (cpp/bindings_reference.cpp).
reference: Any
Activations: Any
Cache: Any
RowOps: Any

def row_ops_names() -> list[str]: ...
