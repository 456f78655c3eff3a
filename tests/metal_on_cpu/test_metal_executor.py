"""The executor on Metal: the dispatcher picks it, the engine serves with it and says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import isobatch_kernels
from executor_service import wire, wire_capabilities
from executor_service.config import ExecutorConfig
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.kernels import create_backend, self_test_of
from executor_service.engine.open_sequences import Opening
from executor_service.engine.profile import StepShape
from executor_service.metrics import Metrics
from executor_service.models.registry import ModelLocation
from isobatch.executor.v1 import token_rows_pb2
from isobatch_kernels.cpu_units import UNIT_VARIABLE
from isobatch_kernels.metal import create
from isobatch_kernels.step import Stat
from isobatch_kernels.tuning import Tunable
from tests.metal_on_cpu.harness.arrays import MlxFrontedFactory
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.support.steps import Row, Want, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

SHAPE = TinyShape(num_layers=1, vocab_size=64)
WANT = Want(Stat.ARGMAX | Stat.DIGEST)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX with a Metal device: its arrays on the CPU, its kernels from the harness."""
    monkeypatch.delenv(UNIT_VARIABLE, raising=False)
    monkeypatch.setattr(create, "metal_is_available", lambda: True)
    monkeypatch.setattr(mx, "set_default_device", lambda _: None)
    monkeypatch.setattr(mx, "set_cache_limit", lambda _: None)
    factory = MlxFrontedFactory(EmulatedKernelFactory())
    monkeypatch.setattr(create, "mlx_kernel_factory", lambda: factory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelLocation]:
    path = tmp_path_factory.mktemp("metal")
    write_directory(path, SHAPE, Storage(4, 32, "float16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(path / "cache"))
        yield ModelLocation(path, "tiny")


def _config(backend: str) -> ExecutorConfig:
    return ExecutorConfig(
        listen="unix:/unused/e.sock",
        backend=backend,
        kv_memory_mb=1,
        threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=26,
        profile="off",
    )


def _build(model: ModelLocation, backend: str, profile: str = "off") -> Engine:
    config = replace(_config(backend), profile=profile)
    return build_engine(config, model, create_backend, self_test_of(backend, "auto"))


def _answers(engine: Engine) -> tuple[list[bytes], set[int]]:
    """Digests of a prompt's and of two more tokens' logits, and the units on the wire."""
    ticket = engine.session.start(1)
    engine.session.open(ticket, [Opening(1, 0, "", "", np.zeros(0, np.int32), 0)])
    digests: list[bytes] = []
    units: set[int] = set()
    start, tokens = 0, [3, 1, 4, 1, 5]
    for step_id in (1, 2, 3):
        rows = [Row(1, tuple(tokens), start, want=WANT)]
        answer = engine.session.step(ticket, step_request(step_id, rows), 0)
        assert answer.results is not None
        digests.append(answer.results.digests)
        message = wire.step_result(answer, 1, 0)
        units |= {each.unit for each in message.kernel_paths}
        start, tokens = start + len(tokens), [int(answer.results.argmax_ids[0])]
    return digests, units


@pytest.mark.usefixtures("mac")
def test_the_executor_serves_with_metal(
    model: ModelLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself on a Mac, without the native module; the same bits as the CPU, and it says so."""
    cpu = _build(model, "reference")
    expected, units = _answers(cpu)
    assert units == {token_rows_pb2.KERNEL_UNIT_SCALAR}
    assert cpu.capabilities.build.backend == "reference"
    monkeypatch.delattr(isobatch_kernels, "_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "isobatch_kernels._cpu", None)
    metal = _build(model, "auto")
    got, units = _answers(metal)
    assert got == expected
    assert units == {token_rows_pb2.KERNEL_UNIT_METAL}
    told = metal.capabilities
    assert told.model.numeric_class == cpu.capabilities.model.numeric_class
    assert (told.build.backend, told.build.unit, told.self_test.refused) == ("metal", "metal", ())
    assert told.self_test.num_cases >= 28
    message = wire_capabilities.capabilities(1, _config("auto"), told)
    assert (message.build.backend, message.build.unit) == ("metal", "metal")
    metrics = Metrics(told, metal.kv_pool_bytes, metal.weight_bytes)
    names = {"version": told.build.version, "device": told.build.device, "unit": "metal"}
    names["mlx_version"] = told.build.mlx_version
    value = metrics.registry.get_sample_value("isobatch_executor_build_info", names)
    assert value == 1
    metal.close()
    cpu.close()


@pytest.mark.usefixtures("mac")
def test_a_measured_profile_and_its_choices_change_no_bit(model: ModelLocation) -> None:
    cpu = _build(model, "reference")
    expected, _ = _answers(cpu)
    cpu.close()
    metal = _build(model, "metal", "measure")
    found = metal.capabilities.profile
    assert StepShape(1, 1) in {point.shape for point in found.points}
    assert metal.profile_file.exists()
    assert isinstance(metal.backend, Tunable)
    metal.backend.choose({1: "gemv_multi:1", 6: "gemv_multi:3"})
    got, _ = _answers(metal)
    assert got == expected
    metal.close()
