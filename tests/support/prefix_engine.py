"""Engines over a tiny model with the real kernels, and clients that look at cached prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.engine.step_request import StepResults
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.steps import Row, Want, all_wanted, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

WANT = Want(Stat.ARGMAX | Stat.DIGEST)
TEXT = [int(token) for token in np.random.default_rng(5).integers(0, 200, 100)]


def write_model(folder: Path, shape: TinyShape | None = None) -> None:
    """A model of two layers."""
    shape = shape or TinyShape(num_layers=2, vocab_size=200)
    write_directory(folder, shape, Storage(4, 32, "float32"))


def build(folder: Path, **settings: Any) -> Engine:
    """An engine over the tiny model in `folder`."""
    from isobatch_kernels.dispatch import create_backend

    config = ExecutorConfig(
        listen="unix:/unused/e.sock",
        **{"kv_memory_mb": 1, "threads": 2, "profile": "off", **settings},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(folder / "cache"))
        location = ModelLocation(folder, "tiny")
        return build_engine(config, location, create_backend, lambda _: SelfTestResult(0, ()))


class Client:
    """A new scheduler of an engine; what the index knows stays from one to the next."""

    epoch = 0

    def __init__(self, engine: Engine) -> None:
        type(self).epoch += 1
        self.engine = engine
        self.session = engine.session
        self.ticket = self.session.start(self.epoch)
        self.step_id = 0
        self.num_opened = 0

    def open(self, tokens: list[int], most: int = 10**6, salt: str = "") -> tuple[int, int]:
        """Open a sequence; returns its id and the number of cached positions."""
        self.num_opened += 1
        ids = np.array(tokens, np.int32)
        opening = Opening(self.num_opened, 0, "", salt, ids, most)
        return self.num_opened, self.session.open(self.ticket, [opening])[0]

    def step(self, *rows: Row, verify: bool = False) -> StepResults:
        """Compute a step."""
        self.step_id += 1
        request = step_request(self.step_id, rows)
        answer = self.session.step(self.ticket, all_wanted(request) if verify else request, 0)
        self.session.check_integrity()
        assert answer.results is not None
        return answer.results

    def digest(self, sequence_id: int, tokens: list[int], start: int, chunk: int = 512) -> bytes:
        """Compute the rest of a text and return the digest of its last logits."""
        while True:
            piece = tuple(tokens[start : start + chunk])
            results = self.step(Row(sequence_id, piece, start, want=WANT))
            start += len(piece)
            if start == len(tokens):
                return results.digests

    def run(self, tokens: list[int], salt: str = "") -> tuple[int, bytes]:
        """Open a sequence and compute a text; returns the cached positions and the digest."""
        sequence_id, cached = self.open(tokens, salt=salt)
        return cached, self.digest(sequence_id, tokens, cached)
