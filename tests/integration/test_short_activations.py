"""Class X1-a8: activations of 8 bits are a class of their own, with the same promise inside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.errors import ConfigError
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.steps import Row, Want, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

PROMPT = tuple(int(token) for token in np.random.default_rng(3).integers(6, 200, 45))
WANT = Want(Stat.ARGMAX | Stat.DIGEST)


def _class_and_digests(model: Path, activations: int, unit: str) -> tuple[str, set[bytes]]:
    """Numeric class, and the digests of one prompt's logits alone, in company and in chunks."""
    config = ExecutorConfig(
        listen="unix:/unused/e.sock",
        kv_memory_mb=1,
        threads=2,
        unit=unit,
        activations=activations,
        profile="off",
    )
    engine = build_engine(
        config,
        ModelLocation(model, "tiny"),
        dispatch.create_backend,
        lambda _: SelfTestResult(0, ()),
    )
    session = engine.session
    ticket = session.start(1)
    session.open(ticket, [Opening(n, 0, "", "", np.zeros(0, np.int32), 0) for n in range(1, 5)])
    steps: list[tuple[Row, ...]] = [
        (Row(1, PROMPT, want=WANT),),
        (Row(2, PROMPT, want=WANT), Row(3, (7,) * 9, want=None)),
        (Row(4, PROMPT[:20], want=None),),
        (Row(4, PROMPT[20:], 20, want=WANT),),
    ]
    digests: set[bytes] = set()
    for step_id, rows in enumerate(steps, 1):
        results = session.step(ticket, step_request(step_id, rows), 0).results
        assert results is not None
        digests |= {results.digests} if results.digests else set()
    engine.close()
    return engine.capabilities.model.numeric_class, digests


def test_one_answer_in_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a class all bits are equal, on every unit; between classes they differ."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    write_directory(tmp_path, TinyShape(num_layers=2, vocab_size=200), Storage(4, 32, "float32"))
    found = {
        activations: {
            unit: _class_and_digests(tmp_path, activations, unit)
            for unit in dispatch.available_units()
        }
        for activations in (12, 8)
    }
    whole, short = (next(iter(units.values())) for units in found.values())
    for units, expected in zip(found.values(), (whole, short), strict=True):
        assert all(answer == expected for answer in units.values())
        assert len(expected[1]) == 1
    assert (whole[0][:8], short[0][:7]) == ("X1.1-a12", "X1.1-a8")
    assert whole[1] != short[1]


def test_other_widths_are_refused() -> None:
    """The message says what there is."""
    with pytest.raises(ConfigError, match=r"activations must be 12 or 8, got 10"):
        ExecutorConfig(listen="unix:/unused/e.sock", activations=10)
