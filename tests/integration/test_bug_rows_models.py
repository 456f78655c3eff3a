"""Faults of other servers with unusual models: odd sizes, shared and missing heads.

See docs/bug_rows.md. Logits are compared by their digests, the best unit against the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.engine.step_request import RowOutcome
from executor_service.errors import ModelError
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.steps import Row, Want, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")
WANT = Want(Stat.ARGMAX | Stat.DIGEST)
# A prompt, one token beside it, and a row that continues: one row, few rows, many rows.
PROMPT = tuple(range(5, 44))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))


def _bits(model: Path, unit: str = "auto") -> list[bytes]:
    """Digests of the logits of a few rows; all of them must be finite."""
    config = ExecutorConfig(
        listen="unix:/unused/e.sock", kv_memory_mb=1, threads=1, unit=unit, profile="off"
    )
    engine = build_engine(
        config, ModelLocation(model, "m"), dispatch.create_backend, lambda _: SelfTestResult(0, ())
    )
    try:
        session = engine.session
        ticket = session.start(1)
        session.open(ticket, [Opening(i, 0, "", "", np.zeros(0, np.int32), 0) for i in (1, 2, 3)])
        digests = b""
        for step_id, rows in enumerate(
            (
                [Row(1, PROMPT, want=WANT)],
                [Row(1, (7,), len(PROMPT), want=WANT)],
                [Row(1, (8,), len(PROMPT) + 1, want=WANT), Row(2, (9,), want=WANT),
                 Row(3, (4, 5, 6), want=WANT)],
            ),
            start=1,
        ):  # fmt: skip
            results = session.step(ticket, step_request(step_id, rows), 0).results
            assert results is not None
            assert results.row_outcomes.tolist() == [RowOutcome.COMPUTED] * len(rows)
            digests += results.digests
        return [digests[start : start + 16] for start in range(0, len(digests), 16)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("shape", "storage"),
    [
        (TinyShape(intermediate_size=172), Storage(4, overrides=(("down_proj", 0),))),
        (TinyShape(hidden_size=100, intermediate_size=172), Storage(0)),
        (TinyShape(num_heads=2, num_kv_heads=1, head_dim=80), Storage(4)),
        (TinyShape(num_heads=2, num_kv_heads=1, head_dim=96), Storage(8)),
        (TinyShape(num_heads=7, num_kv_heads=1, head_dim=32), Storage(4)),
        (TinyShape(architecture="qwen2", num_heads=6, num_kv_heads=1), Storage(4)),
        (TinyShape(vocab_size=47), Storage(4)),
    ],
    ids=["width 172 beside groups", "width 100", "head 80", "head 96", "7 heads", "qwen2", "47"],
)
def test_b07_odd_sizes_are_computed_as_the_reference_does(
    tmp_path: Path, shape: TinyShape, storage: Storage
) -> None:
    write_directory(tmp_path / "m", shape, storage)
    digests = _bits(tmp_path / "m")
    assert len(set(digests)) == len(digests) == 5
    assert _bits(tmp_path / "m", "reference") == digests


def _with_head(model: Path) -> None:
    """Add a head that equals the embedding."""
    path = str(model / "model.safetensors")
    tensors = mx.load(path)
    assert isinstance(tensors, dict)
    head = {
        name.replace("model.embed_tokens", "lm_head"): value
        for name, value in tensors.items()
        if "embed_tokens" in name
    }
    mx.save_safetensors(path, tensors | head)


def _config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("bits", [0, 4])
def test_b11_shared_doubled_and_missing_heads(tmp_path: Path, bits: int) -> None:
    model = tmp_path / "m"
    write_directory(model, TinyShape(), Storage(bits))
    tied = _bits(model)
    _config(model, tie_word_embeddings=False)
    with pytest.raises(ModelError, match="head must be in the file"):
        _bits(model)
    _with_head(model)
    assert _bits(model) == tied
    _config(model, tie_word_embeddings=True)
    assert _bits(model) == tied
