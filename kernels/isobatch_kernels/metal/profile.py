"""The Metal backend's choices of speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from isobatch_kernels.metal.linear import LinearProfile


@dataclass(frozen=True, slots=True)
class MetalProfile:
    """Choices of speed; no bit depends on them. Also what the self-test behind them found."""

    linear: LinearProfile = field(default_factory=LinearProfile)
    # With fewer threadgroups than this, attention gives every chunk its own.
    split_below: int = 64
    use_split: bool = True
    tested_cases: int = 0
    refused: tuple[str, ...] = ()
