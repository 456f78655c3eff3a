"""The session on the real kernels: the bits of a row do not depend on its company or its cuts."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.engine.step_request import RowOutcome, StepResults
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.steps import Row, Want, step_request
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

SHAPE = TinyShape(num_layers=2, vocab_size=200, tied=False)
# Its embedding is so large that every row with it stops being finite.
HUGE_TOKEN = 5
WANT = Want(Stat.ARGMAX | Stat.DIGEST)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(6, 200, 45)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path, SHAPE, Storage(4, 32, "float32"))
    file = str(path / "model.safetensors")
    tensors = mx.load(file)
    assert isinstance(tensors, dict)
    scales = np.array(tensors["model.embed_tokens.scales"])
    scales[HUGE_TOKEN] = 1e30
    tensors["model.embed_tokens.scales"] = mx.array(scales)
    mx.save_safetensors(file, tensors)
    config = ExecutorConfig(listen="unix:/unused/e.sock", kv_memory_mb=1, threads=2, profile="off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(path / "cache"))
        built = build_engine(
            config,
            ModelLocation(path, "tiny"),
            dispatch.create_backend,
            lambda _: SelfTestResult(0, ()),
        )
    yield built
    built.close()


class _Client:
    """Steps of a fresh session."""

    epoch = 0

    def __init__(self, engine: Engine, *sequence_ids: int) -> None:
        type(self).epoch += 1
        self.session = engine.session
        self.ticket = self.session.start(self.epoch)
        openings = [Opening(each, 0, "", "", np.zeros(0, np.int32), 0) for each in sequence_ids]
        self.session.open(self.ticket, openings)
        self.step_id = 0

    def step(self, *rows: Row) -> StepResults:
        self.step_id += 1
        answer = self.session.step(self.ticket, step_request(self.step_id, rows), 0)
        self.session.check_integrity()
        assert answer.results is not None
        return answer.results


def _digests(results: StepResults) -> list[bytes]:
    raw = results.digests
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]


@pytest.fixture(scope="module")
def solo(engine: Engine) -> list[bytes]:
    """Digests after the prompt and after each of three more tokens, alone and uncut."""
    client = _Client(engine, 1)
    results = client.step(Row(1, tuple(PROMPT), want=WANT))
    digests = _digests(results)
    for count in range(3):
        token = int(results.argmax_ids[0])
        results = client.step(Row(1, (token,), len(PROMPT) + count, want=WANT))
        assert results.row_outcomes.tolist() == [RowOutcome.COMPUTED]
        digests += _digests(results)
    assert len(set(digests)) == len(digests)
    return digests


@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 44])
def test_chunks_and_company(engine: Engine, solo: list[bytes], chunk: int) -> None:
    client = _Client(engine, 1, 2, 3)
    got: list[bytes] = []
    position, noise = 0, 0
    tokens = list(PROMPT)
    while len(got) < len(solo):
        piece = tuple(tokens[position : position + chunk])
        # Company of changing lengths on both sides, asking for other things.
        before = Row(2, (7,) * (1 + noise % 3), want=Want(Stat.QUANTILE, quantile=0.5))
        after = Row(3, (9, 11), want=None)
        results = client.step(before, Row(1, piece, position, want=WANT), after)
        position += len(piece)
        noise += 1
        if position == len(tokens):
            got.append(_digests(results)[1])
            tokens.append(int(results.argmax_ids[1]))
    assert got == solo


def test_outputs_as_sources_are_the_same_tokens(engine: Engine, solo: list[bytes]) -> None:
    client = _Client(engine, 1)
    digests = _digests(client.step(Row(1, tuple(PROMPT), want=WANT)))
    for count in range(3):
        row = Row(1, (0,), len(PROMPT) + count, want=WANT, output_of=(count + 1, 0))
        digests += _digests(client.step(row))
    assert digests == solo


def test_a_row_that_is_not_finite_names_its_op_and_disturbs_nobody(
    engine: Engine, solo: list[bytes]
) -> None:
    client = _Client(engine, 1, 2)
    results = client.step(Row(2, (8, HUGE_TOKEN, 9), want=WANT), Row(1, tuple(PROMPT), want=WANT))
    assert results.row_outcomes.tolist() == [RowOutcome.NON_FINITE, RowOutcome.COMPUTED]
    (detail,) = results.non_finite_details
    assert detail == "layers.0.attention_norm"
    assert _digests(results)[1] == solo[0]


def test_blocks_of_a_row_that_was_not_finite_are_clean_for_the_next(
    engine: Engine, solo: list[bytes]
) -> None:
    """The whole pool has held such a row; whoever gets its blocks next sees nothing of it."""
    client = _Client(engine, 2)
    total = engine.capabilities.model.num_blocks * 16
    for start in range(0, min(total, SHAPE.context_length), 64):
        client.step(Row(2, (HUGE_TOKEN,) * 64, start, want=None))
    client = _Client(engine, 1)
    assert _digests(client.step(Row(1, tuple(PROMPT), want=WANT))) == solo[:1]
