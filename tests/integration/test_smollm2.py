"""SmolLM2-135M-Instruct itself: ids, a sensible answer, and the same bits however it is cut.

Class X1 gives the same bits on every machine, so whole answers are compared with ==.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer

from executor_service.config import ExecutorConfig
from executor_service.engine.capabilities import SelfTestResult
from executor_service.engine.engine import Engine, build_engine
from executor_service.engine.open_sequences import Opening
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import Stat
from tests.support.embedded_model import embedded_model_path
from tests.support.steps import Row, Want, step_request

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

QUESTION = "What is the capital of France?"
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    location = ModelLocation(embedded_model_path(), "smollm2")
    config = ExecutorConfig(
        listen="unix:/unused/e.sock", kv_memory_mb=64, metrics_port=0, profile="off"
    )
    built = build_engine(config, location, dispatch.create_backend, lambda _: SelfTestResult(0, ()))
    yield built
    built.close()


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer.from_str(engine.capabilities.tokenizer.tokenizer_json.decode())


class _Run:
    """One sequence in a session of its own."""

    def __init__(self, engine: Engine, epoch: int) -> None:
        self.session = engine.session
        self.ticket = self.session.start(epoch)
        self.session.open(self.ticket, [Opening(1, 0, "", "", np.zeros(0, np.int32), 0)])
        self.step_id = 0
        self.position = 0

    def step(self, tokens: list[int]) -> tuple[int, bytes]:
        """The argmax after these tokens, and the digest of the logits' bytes."""
        self.step_id += 1
        want = Want(Stat.ARGMAX | Stat.DIGEST)
        row = Row(1, tuple(tokens), self.position, want=want)
        answer = self.session.step(self.ticket, step_request(self.step_id, [row]), 0)
        self.position += len(tokens)
        assert answer.results is not None
        return int(answer.results.argmax_ids[0]), answer.results.digests

    def answer(self, prompt: list[int], chunk: int, count: int) -> list[tuple[int, bytes]]:
        """Greedy tokens after a prompt that is cut into chunks."""
        for start in range(0, len(prompt), chunk):
            result = self.step(prompt[start : start + chunk])
        results = [result]
        while len(results) < count:
            results.append(self.step([results[-1][0]]))
        return results


def test_known_ids(tokenizer: Tokenizer, engine: Engine) -> None:
    """Control tokens, digits one by one, and words with their space."""
    ids = tokenizer.encode("<|im_start|>user\nHi 42<|im_end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.encode("Hi 42").tokens == ["Hi", "Ġ", "4", "2"]
    assert tokenizer.decode(tokenizer.encode("naïve café 🦊\n\n  x").ids) == "naïve café 🦊\n\n  x"
    data = engine.capabilities.tokenizer
    assert data.eos_token_ids == (0, 2)
    assert "<|im_start|>" in data.chat_template


def test_identity(engine: Engine) -> None:
    model, limits = engine.capabilities.model, engine.capabilities.limits
    assert model.architecture == "llama"
    assert (limits.vocab_size, limits.context_length) == (49152, 8192)
    assert model.num_parameters == 134515008
    expected = "b2b18843b6341ec462e9b99720b10d8400c7572176fb6930a75325e8caf113ba"
    assert model.weights_digest == expected


def test_answers_a_question(engine: Engine, tokenizer: Tokenizer) -> None:
    results = _Run(engine, epoch=1).answer(tokenizer.encode(PROMPT).ids, chunk=512, count=8)
    tokens = [token for token, _ in results]
    assert tokenizer.decode(tokens) == "The capital of France is Paris."
    assert tokens[-1] in engine.capabilities.tokenizer.eos_token_ids


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_of_the_prompt_do_not_change_a_bit(
    engine: Engine, tokenizer: Tokenizer, chunk: int
) -> None:
    prompt = tokenizer.encode(PROMPT).ids
    whole = _Run(engine, epoch=10 + 2 * chunk).answer(prompt, 512, 6)
    cut = _Run(engine, epoch=11 + 2 * chunk).answer(prompt, chunk, 6)
    assert cut == whole
