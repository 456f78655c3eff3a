"""Every rule of the sampling parameters, at its border and beyond."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core import InvalidParameterError, SamplingParams
from scheduler_service.sampling import validate

VOCAB_SIZE = 100
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1e30},
        {"top_k": 0},
        {"top_k": 10**9},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logit_bias": ((0, -100.0), (99, 100.0))},
    ],
)
def test_borders_are_valid(changes: dict[str, Any]) -> None:
    """The largest and smallest legal values pass."""
    validate(replace(SamplingParams(), **changes), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"temperature": value}, "temperature") for value in (-1e-9, NAN, INF, -INF)),
        ({"top_k": -1}, "top_k"),
        *(({"top_p": value}, "top_p") for value in (-0.1, 1.1, NAN, INF, -INF)),
        *(({"min_p": value}, "min_p") for value in (-0.1, 1.1, NAN, INF, -INF)),
        *(({"seed": value}, "seed") for value in (-1, 2**64)),
        *(({"logit_bias": ((i, 1.0),)}, f"logit_bias[{i}]") for i in (-1, 100)),
        *(({"logit_bias": ((7, v),)}, "logit_bias[7]") for v in (100.5, -100.5, NAN, INF)),
        ({"logit_bias": ((7, 1.0), (7, 2.0))}, "logit_bias[7]"),
    ],
)
def test_values_beyond_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """The error carries the field, the rule and the value, and says them."""
    with pytest.raises(InvalidParameterError) as caught:
        validate(replace(SamplingParams(), **changes), VOCAB_SIZE)
    assert caught.value.field == field
    message = f"[sampling] {field} {caught.value.rule}, got {caught.value.got!r}"
    assert str(caught.value) == message
