"""Lengths of prompts and answers as they were seen in a public service.

Quantiles of the Azure LLM inference trace 2023 (19,366 conversations' requests and 8,819 of code
completion, an hour of 16 November 2023), computed from the published files
`AzureLLMInferenceTrace_conv.csv` and `AzureLLMInferenceTrace_code.csv`:
https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md (CC-BY).
Described in: P. Patel, E. Choukse, C. Zhang, A. Shah, I. Goiri, S. Maleki, R. Bianchini,
"Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.

Prompt and answer lengths are drawn apart: their logarithms' correlation is 0.09 and 0.00 there.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass
from typing import Final

_SHARES: Final = (
    0.0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths by its values at `_SHARES`."""

    values: tuple[int, ...]

    def draw(self, source: random.Random) -> int:
        """Return a length: between two quantiles all are alike."""
        share = source.random()
        index = min(bisect.bisect_right(_SHARES, share), len(_SHARES) - 1)
        low, high = _SHARES[index - 1], _SHARES[index]
        part = (share - low) / (high - low)
        return round(self.values[index - 1] + part * (self.values[index] - self.values[index - 1]))

    @property
    def mean(self) -> float:
        """The mean length."""
        parts = zip(_SHARES, _SHARES[1:], self.values, self.values[1:], strict=False)
        return sum((b - a) * (x + y) / 2 for a, b, x, y in parts)


CONVERSATION_PROMPT: Final = Quantiles(
    (2, 29, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 2734, 4083, 4142, 14050)
)
CONVERSATION_ANSWER: Final = Quantiles(
    (7, 16, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 424, 451, 601, 1000)
)
CODE_PROMPT: Final = Quantiles(
    (3, 17, 75, 147, 385, 578, 770, 1075, 1469, 1909, 2433, 2744, 3192, 5187, 7303, 7436, 7437)
)
CODE_ANSWER: Final = Quantiles((6, 6, 6, 7, 8, 9, 9, 11, 13, 16, 20, 24, 29, 55, 90, 251, 1899))
