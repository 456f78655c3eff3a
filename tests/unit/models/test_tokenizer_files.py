"""Tokenizers of Hugging Face-style directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor_service.errors import ModelError
from executor_service.models.tokenizer_files import tokenizer_from_directory
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tokenizer_document


def _write(path: Path, **files: object) -> Path:
    (path / "tokenizer.json").write_bytes(tokenizer_document())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_reads_template_and_ids(tmp_path: Path) -> None:
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}}
    _write(tmp_path, tokenizer_config=settings, generation_config={"eos_token_id": [2, 0]})
    data = tokenizer_from_directory(tmp_path)
    assert json.loads(data.tokenizer_json) == json.loads(tokenizer_document())
    assert data.chat_template == CHAT_TEMPLATE
    assert data.eos_token_ids == (0, 2)
    assert data.special_token_ids == (0, 1, 2)
    assert data.bos_token_id is None
    assert not data.add_bos_token


def test_bos_is_added_when_the_settings_say_so(tmp_path: Path) -> None:
    settings = {"bos_token": "<|im_start|>", "add_bos_token": True}
    data = tokenizer_from_directory(_write(tmp_path, tokenizer_config=settings))
    assert (data.bos_token_id, data.add_bos_token) == (1, True)


def test_bos_is_added_when_only_the_document_says_so(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer_config={"bos_token": "<|im_start|>"})
    assert not tokenizer_from_directory(tmp_path).add_bos_token
    document = json.loads(tokenizer_document())
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    pieces = [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert tokenizer_from_directory(tmp_path).add_bos_token


def test_a_template_may_be_a_list_or_a_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    _write(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer_from_directory(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_from_directory(tmp_path).chat_template == "file"


def test_a_missing_or_foreign_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be readable.*tokenizer\.json"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Magic"}}')
    with pytest.raises(ModelError, match=r"library must read the file, got .*tokenizer\.json"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("end", [-1, 2**24, 2**63, 10**30])
def test_an_end_id_that_no_vocabulary_has_is_refused(tmp_path: Path, end: int) -> None:
    """It would fit no message to the scheduler."""
    for name in ("config", "generation_config"):
        folder = tmp_path / name
        folder.mkdir()
        _write(folder, **{name: {"eos_token_id": [2, end]}})
        words = rf"eos_token_id must be in 0..16777215, got {end}: .*{name}\.json"
        with pytest.raises(ModelError, match=words):
            tokenizer_from_directory(folder)


def test_a_token_id_beyond_every_vocabulary_is_refused(tmp_path: Path) -> None:
    """The scheduler would make a table of billions of entries."""
    document = json.loads(tokenizer_document())
    document["model"]["vocab"]["a"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    words = r"the id of token 'a' must be below 16777216, got 2147483648: .*tokenizer\.json"
    with pytest.raises(ModelError, match=words):
        tokenizer_from_directory(tmp_path)


def test_templates_that_are_none_are_passed_over_or_named(tmp_path: Path) -> None:
    odd = [{"name": ["default"], "template": 1}, {"name": "default", "template": "yes"}]
    _write(tmp_path, tokenizer_config={"chat_template": odd})
    assert tokenizer_from_directory(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"must be UTF-8, got .*chat_template\.jinja"):
        tokenizer_from_directory(tmp_path)
