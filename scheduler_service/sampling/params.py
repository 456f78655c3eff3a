"""What sampling parameters are valid."""

from __future__ import annotations

import math
from typing import Final

from scheduler_service.core.errors import InvalidParameterError
from scheduler_service.core.params import SamplingParams

MAX_SEED: Final = 2**64 - 1
MAX_LOGIT_BIAS: Final = 100.0


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Check parameters against a vocabulary of `vocab_size` ids.

    A `top_k` above the vocabulary is valid and keeps all ids.

    Raises:
        InvalidParameterError: With the first field that breaks its rule; of a wrong bias the
            field reads `logit_bias[ID]`.
    """
    _require(
        math.isfinite(params.temperature) and params.temperature >= 0,
        "temperature",
        "must be a finite number of at least 0",
        params.temperature,
    )
    _require(params.top_k >= 0, "top_k", "must be at least 0", params.top_k)
    # A NaN fails both comparisons, so these two lines refuse it as well.
    _require(0 <= params.top_p <= 1, "top_p", "must be in [0, 1]", params.top_p)
    _require(0 <= params.min_p <= 1, "min_p", "must be in [0, 1]", params.min_p)
    _require(0 <= params.seed <= MAX_SEED, "seed", "must be in [0, 2^64)", params.seed)
    seen: set[int] = set()
    for token_id, value in params.logit_bias:
        name = f"logit_bias[{token_id}]"
        _require(
            0 <= token_id < vocab_size, name, f"must name an id in [0, {vocab_size})", token_id
        )
        _require(token_id not in seen, name, "must name each id once", token_id)
        _require(abs(value) <= MAX_LOGIT_BIAS, name, "must be in [-100, 100]", value)
        seen.add(token_id)


def _require(holds: bool, field: str, rule: str, got: object) -> None:
    if not holds:
        raise InvalidParameterError("sampling", field, rule, got)
