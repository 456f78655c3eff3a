"""Float policies through an executor's engine: what neighbours change, and what they do not."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult, numeric_class
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.errors import ConfigError
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.models.registry import ModelLocation
from isobatch_kernels.kernel_policy import KernelPolicy
from isobatch_kernels.step import Stat
from tests.support.embedded_model import embedded_model_path
from tests.support.executor_harness import running
from tests.support.steps import Row, Want, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

POLICIES = ("exact", "mlx", "threshold", "gemv", "gemm")
# Kernel path of one row, where it is another than gemv.
_ALONE = {"gemm": "gemm", "mlx": "other"}
SUBJECT, OTHER = 1, 2
DIGEST = Want(Stat.ARGMAX | Stat.DIGEST)


def _engine(model: Path, policy: str, **settings: object) -> Engine:
    config = ExecutorConfig(
        listen="unix:/unused/e.sock", kv_memory_mb=16, metrics_port=0, profile="off",
        policy=policy, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    return build_engine(
        config, ModelLocation(model, "m"), dispatch.create_backend, lambda _: SelfTestResult(0, ())
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "tiny"
    write_directory(folder, TinyShape(), Storage(4))
    return folder


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return embedded_model_path()


def _digests(engine: Engine, epoch: int, company: bool, vocab: int) -> tuple[list[bytes], set[str]]:
    """A sequence's digests over a prompt read token by token; with company, four rows beside it."""
    rng = np.random.default_rng(11)
    prompt = [int(t) for t in rng.integers(0, vocab, 6)]
    session = engine.session
    ticket = session.start(epoch)
    none = np.zeros(0, np.int32)
    sequences = (SUBJECT, OTHER) if company else (SUBJECT,)
    session.open(ticket, [Opening(each, 0, "", "", none, 0) for each in sequences])
    digests, paths = [], set()
    for position, token in enumerate(prompt):
        rows = [Row(SUBJECT, (token,), position, want=DIGEST)]
        if company:
            beside = tuple(int(t) for t in rng.integers(0, vocab, 4))
            rows.append(Row(OTHER, beside, 4 * position, want=DIGEST))
        answer = session.step(ticket, step_request(position + 1, rows), 0)
        assert answer.results is not None
        digests.append(answer.results.digests[:16])
        paths |= {each.path for each in answer.results.paths if each.op == "linear"}
    return digests, paths


@pytest.mark.parametrize(
    ("policy", "model"),
    [*((each, "tiny") for each in POLICIES), ("threshold", "smollm2"), ("gemv", "smollm2")],
)
def test_what_company_changes(policy: str, model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    engine = _engine(path, policy, threads=1)
    try:
        vocab = engine.capabilities.limits.vocab_size
        alone, paths = _digests(engine, 1, company=False, vocab=vocab)
        again, _ = _digests(engine, 2, company=False, vocab=vocab)
        beside, _ = _digests(engine, 3, company=True, vocab=vocab)
    finally:
        engine.close()
    assert alone == again
    assert paths == {_ALONE.get(policy, "gemv")}
    if policy == "threshold":
        # The first token's digest may hide the rounding; the cache carries it on.
        assert all(one != other for one, other in zip(alone[1:], beside[1:], strict=True))
    else:
        assert alone == beside


def test_the_class_tells_the_policy(tiny: Path) -> None:
    told = set()
    for policy, rows in (*((each, 4) for each in POLICIES), ("threshold", 5)):
        engine = _engine(tiny, policy, threshold_rows=rows, backend="cpu")
        told.add(engine.capabilities.model.numeric_class.partition("-rope")[0])
        engine.close()
    assert told == {
        "X1.1-a12-kvf16", "F1-threshold4-a16f-kvf16", "F1-threshold5-a16f-kvf16",
        f"F1-mlx-{version('mlx')}-cpu-a16f-kvf16", "F1-gemv-a16f-kvf16", "F1-gemm-a16f-kvf16",
    }  # fmt: skip


def test_no_cache_block_has_the_key_of_another_class() -> None:
    policies = [KernelPolicy(name) for name in POLICIES] + [KernelPolicy("threshold", 5)]
    classes = [numeric_class("00000000", policy=each) for each in policies]
    roots = [
        Chains(CacheIdentity(each, "f16", "weights", "config", 16)).root("") for each in classes
    ]
    digests = {root.digest for root in roots if root is not None}
    assert len(digests) == len(policies)


def test_a_device_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy gemv needs MLX with its metal device, got none"):
        _engine(tiny, "gemv", backend="metal")


@pytest.mark.parametrize("policy", ["exact", "threshold", "gemv"])
async def test_a_policy_that_company_may_change_is_warned_of(
    policy: str, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running(tiny, policy=policy, profile="off"):
            pass
    assert ("other requests may change results" in caplog.text) == (policy == "threshold")
