"""The draft model that the package carries: its size, its shape, its target's own tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from executor_service.models.load import LoadedModel, load_model
from executor_service.models.registry import DRAFT_MODEL, bundled_path, locate

MOST_BYTES = 12_000_000
# Of SmolLM2-135M-Instruct's file: its tokens and merges, as a JSON document of both.
TOKENIZER_SHA256 = "ca311e28477f6026db385800730a0cc5a4a941f73cac7b2562ae3d47d4e3cca5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_model(locate(DRAFT_MODEL))


def test_it_is_small() -> None:
    assert bundled_path(DRAFT_MODEL).stat().st_size <= MOST_BYTES


def test_its_licence_lies_beside_it() -> None:
    notice = bundled_path(DRAFT_MODEL).with_name("NOTICE").read_text("utf-8")
    assert "Apache License, Version 2.0" in notice
    assert DRAFT_MODEL in notice


def test_it_is_a_small_llama_with_a_tied_embedding(model: LoadedModel) -> None:
    config = model.config
    assert config.architecture == "llama"
    assert config.tied_embeddings
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (256, 6, 49152)
    assert model.num_parameters == 16_223_488


def test_its_tokenizer_is_its_targets(model: LoadedModel) -> None:
    document = json.loads(model.tokenizer.tokenizer_json)["model"]
    both = json.dumps([document["vocab"], document["merges"]], ensure_ascii=False)
    assert hashlib.sha256(both.encode()).hexdigest() == TOKENIZER_SHA256
    assert model.tokenizer.eos_token_ids == (0, 2)


def test_the_recipe_says_which_file_it_is() -> None:
    digest = hashlib.sha256(bundled_path(DRAFT_MODEL).read_bytes()).hexdigest()
    assert digest in (Path(__file__).parents[3] / "training" / "README.md").read_text("utf-8")
