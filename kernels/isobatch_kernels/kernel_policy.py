"""Kernel policies of linear layers: class X1, and the float arithmetic of other engines.

`exact` is the product. The others exist so that their effect can be seen and measured: they
multiply fp16 activations with dequantised weights, and some of them pick another kernel, which
rounds otherwise, when other requests share the step (docs/numerics.md section 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EXACT: Final = "exact"
MLX: Final = "mlx"
# Each knows its kernel from the rows of a step alone.
ROW_POLICIES: Final = ("threshold", "gemv", "gemm")
POLICIES: Final = (EXACT, MLX, *ROW_POLICIES)
# With these another request's rows may choose the kernel; with MLX's kernels it is so with `gemm`
# too, whose tiles MLX picks by rows.
_COMPANY_POLICIES: Final = (MLX, "threshold")
DEFAULT_THRESHOLD_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class KernelPolicy:
    """Which kernels linear layers may use."""

    name: str = EXACT
    # Of `threshold`: most rows that are computed row by row.
    threshold_rows: int = DEFAULT_THRESHOLD_ROWS

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown policy or a negative number of rows."""
        if self.name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"[policy] policy must be one of {known}, got {self.name!r}")
        if self.threshold_rows < 0:
            raise ValueError(
                f"[policy] threshold_rows must not be negative, got {self.threshold_rows}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether this is class X1."""
        return self.name == EXACT

    def class_prefix(self) -> str:
        """What a float class's id begins with: two policies never share an id.

        Raises ValueError for `exact`, whose id is the contract's.
        """
        if self.is_exact:
            raise ValueError("[policy] a float class needs a float policy, got 'exact'")
        rows = str(self.threshold_rows) if self.name == "threshold" else ""
        return f"F1-{self.name}{rows}"


def minds_company(policy: str, backend: str) -> bool:
    """Return whether another request's rows may change results under a policy on a backend."""
    return policy in _COMPANY_POLICIES or (policy == "gemm" and backend == MLX)


def float_path(policy: str, threshold_rows: int, rows: int) -> str:
    """Return the kernel path of a float linear layer for a number of rows.

    MLX does not say which kernel it takes.
    """
    if policy == "gemv" or (policy == "threshold" and rows <= threshold_rows):
        return "gemv"
    return "other" if policy == MLX else "gemm"
