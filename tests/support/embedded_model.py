"""The real model that tests use: SmolLM2-135M-Instruct, from the cache or fetched into it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from executor_service.errors import StartError
from executor_service.models.pull import pull
from executor_service.models.registry import DEFAULT_MODEL


@functools.cache
def _pulled() -> Path | str:
    try:
        return pull(DEFAULT_MODEL)
    except StartError as error:
        return str(error)


def embedded_model_path() -> Path:
    """Returns the model's file; skips the test, saying why, where it cannot be had."""
    found = _pulled()
    if isinstance(found, str):
        pytest.skip(f"the model cannot be fetched: {found}")
    return found
