"""Reads the tokenizer of a Hugging Face-style directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer

from executor_service.errors import ModelError
from executor_service.models.checkpoint import TokenizerData
from executor_service.models.files import read_json, read_text

if TYPE_CHECKING:
    from pathlib import Path

    Json = dict[str, object]

# Far beyond every vocabulary.
MAX_TOKEN_IDS: Final = 1 << 24


def tokenizer_from_directory(path: Path) -> TokenizerData:
    """Return the tokenizer; raises ModelError when tokenizer.json is missing or not understood."""
    file = path / "tokenizer.json"
    document = read_json(file)
    _require_understood(file)
    settings = _optional_json(path / "tokenizer_config.json")
    ids = _token_ids(document, file)
    for text, token in ids.items():
        # The scheduler holds a table from id to text.
        if token >= MAX_TOKEN_IDS:
            raise ModelError(
                f"[tokenizer] the id of token {text!r:.80} must be below {MAX_TOKEN_IDS}, "
                f"got {token}: {file}"
            )
    bos = ids.get(_token_text(settings.get("bos_token")))
    return TokenizerData(
        tokenizer_json=json.dumps(document, ensure_ascii=False).encode(),
        chat_template=_chat_template(path, settings),
        eos_token_ids=_end_ids(path, settings, ids),
        bos_token_id=bos,
        add_bos_token=bos is not None and _adds_bos(document, settings, bos),
        special_token_ids=tuple(sorted(_added(document, special=True).values())),
    )


def _require_understood(file: Path) -> None:
    """Raise ModelError for a document that the scheduler, far from the file, could not read."""
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"[tokenizer] the `tokenizers` library must read the file, got {error}: {file}"
        ) from error


def _optional_json(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}


def _added(document: Json, *, special: bool) -> dict[str, int]:
    """Return ids of added tokens by text: the special ones, or all."""
    entries = document.get("added_tokens")
    result: dict[str, int] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and (entry.get("special") is True or not special):
            content, token = entry.get("content"), entry.get("id")
            if isinstance(content, str) and type(token) is int:
                result[content] = token
    return result


def _token_ids(document: Json, file: Path) -> dict[str, int]:
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        # Unigram documents hold a list of pairs, in the order of ids.
        if not isinstance(vocabulary, list):
            raise ModelError(f"[tokenizer] model.vocab must be there, got nothing: {file}")
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    return {**vocabulary, **_added(document, special=False)}


def _token_text(value: object) -> str:
    """Return the text of a token that is written as a string or as an object; empty for none."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(path: Path, settings: Json) -> str:
    """Return the template: a file of its own, one string, or the list's entry named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {
            str(entry.get("name")): entry.get("template")
            for entry in value
            if isinstance(entry, dict)
        }
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _end_ids(path: Path, settings: Json, ids: dict[str, int]) -> tuple[int, ...]:
    """Return the end-of-text ids that tokenizer, generation and model settings name together."""
    ends = {ids[text]} if (text := _token_text(settings.get("eos_token"))) in ids else set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(path / name).get("eos_token_id")
        for end in value if isinstance(value, list) else [value]:
            if type(end) is not int:
                continue
            if not 0 <= end < MAX_TOKEN_IDS:
                raise ModelError(
                    f"[tokenizer] eos_token_id must be in 0..{MAX_TOKEN_IDS - 1}, got {end}: "
                    f"{path / name}"
                )
            ends.add(end)
    return tuple(sorted(ends))


def _adds_bos(document: Json, settings: Json, bos: int) -> bool:
    """Tell whether plain text starts with the begin-of-text id.

    The setting decides; where it is missing, the document's own template does.
    """
    setting = settings.get("add_bos_token")
    if isinstance(setting, bool):
        return setting
    return f'"ids": [{bos}]' in json.dumps(document.get("post_processor"))
