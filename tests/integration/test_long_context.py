"""A model that declares a far longer context than the machine's cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import build_engine
from executor_service.models.registry import ModelLocation
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")
DECLARED = 1 << 20


def test_its_table_ends_where_the_cache_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    write_directory(tmp_path / "m", TinyShape(context_length=DECLARED), Storage(4))
    seen: list[int] = []

    def create(program: Any, **limits: Any) -> Any:
        seen.append(program.dimensions.context_length)
        return dispatch.create_backend(program, **limits)

    classes = set()
    for kv_memory_mb in (1, 16):
        config = ExecutorConfig(
            listen="unix:/unused/e.sock", kv_memory_mb=kv_memory_mb, threads=1, profile="off"
        )
        location = ModelLocation(tmp_path / "m", "m")
        engine = build_engine(config, location, create, lambda _: SelfTestResult(0, ()))
        engine.close()
        model = engine.capabilities.model
        assert engine.capabilities.limits.context_length == DECLARED
        assert min(model.num_blocks * model.block_size, DECLARED) <= seen[-1] < DECLARED
        classes.add(model.numeric_class)
    assert seen[0] < seen[1]
    assert len(classes) == 1
