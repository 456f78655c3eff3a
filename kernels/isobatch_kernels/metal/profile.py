"""The Metal backend's choices of speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from isobatch_kernels.metal.linear import LinearProfile


@dataclass(frozen=True, slots=True)
class MetalProfile:
    """Choices of speed; no bit depends on them. Also what the self-test behind them found."""

    linear: LinearProfile = field(default_factory=LinearProfile)
    # With fewer threadgroups than this, attention gives every chunk its own: in steps with prompts,
    # and in steps that only decode, where partial results are small beside the keys and values.
    split_below: int = 64
    split_decode_below: int = 512
    use_split: bool = True
    # Layers whose ops are handed to the device together; see MetalBackend.submit.
    layers_per_stage: int = 4
    tested_cases: int = 0
    refused: tuple[str, ...] = ()

    def splits(self, threadgroups: int, chunks: int, *, decodes: bool) -> bool:
        """Whether attention of so many threadgroups gives every chunk one of its own."""
        below = self.split_decode_below if decodes else self.split_below
        return self.use_split and chunks > 1 and threadgroups < below
