"""Builds a document for the `tokenizers` library from a GGUF file's vocabulary and merges.

GGUF names the rule that cuts text into pieces before merging by a kind (`tokenizer.ggml.pre`); the
kinds known here are those of the families that this executor runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from executor_service.errors import ModelError
from executor_service.models.checkpoint import TokenizerData

if TYPE_CHECKING:
    from collections.abc import Mapping

    Json = dict[str, object]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Control tokens that end a turn or a text in the chat formats of these families. Files name only
# one of them as end-of-text, and a model may emit any.
END_TEXTS: Final = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
)
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each kind: regular expressions that cut one after the other, every match a piece of its own.
_CUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# Qwen2 composes characters first; Llama 3 takes whole words of the vocabulary without merging.
_NORMALIZED: Final = frozenset(("qwen2",))
_WHOLE_WORDS: Final = frozenset(("llama-bpe", "llama3"))


def tokenizer_from_gguf(metadata: Mapping[str, object], source: str) -> TokenizerData:
    """Return the tokenizer of a checked file's metadata; raises ModelError."""

    def fail(key: str, rule: str, got: object) -> ModelError:
        return ModelError(f"[tokenizer] tokenizer.ggml.{key} {rule}, got {got!r:.80}: {source}")

    def get(key: str) -> object:
        return metadata.get(f"tokenizer.ggml.{key}")

    if get("model") != "gpt2":
        raise fail("model", "must be gpt2 (byte-level pairs)", get("model"))
    kind = get("pre") or "default"
    if kind not in _CUTS:
        raise fail("pre", f"must be one of {', '.join(_CUTS)}", kind)
    tokens = _strings(get("tokens"))
    if tokens is None or len(set(tokens)) != len(tokens):
        raise fail("tokens", "must be a list of different strings", get("tokens"))
    merges = _strings(get("merges")) or []
    if not all(pair.count(" ") == 1 for pair in merges):
        raise fail("merges", "must be pairs of pieces", get("merges"))
    known = set(tokens)
    for pair in merges:
        # The scheduler, far from the file, could not build its tokenizer.
        if not known.issuperset((*pair.split(" "), pair.replace(" ", ""))):
            raise fail("merges", "must be of tokens, and give tokens", pair)
    types = get("token_type")
    types = [NORMAL] * len(tokens) if types is None else types
    if not isinstance(types, list) or len(types) != len(tokens):
        raise fail("token_type", f"must have {len(tokens)} entries", types)

    def token_id(key: str) -> int | None:
        value = get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(tokens):
            raise fail(key, f"must be below {len(tokens)}", value)
        return value

    document = tokenizer_document(str(kind), tokens, merges, types)
    control = [index for index, kind in enumerate(types) if kind == CONTROL]
    ends = {end for key in _END_KEYS if (end := token_id(key)) is not None}
    ends.update(index for index in control if tokens[index] in END_TEXTS)
    template = metadata.get("tokenizer.chat_template")
    return TokenizerData(
        tokenizer_json=json.dumps(document, ensure_ascii=False).encode(),
        chat_template=template if isinstance(template, str) else "",
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=token_id("bos_token_id"),
        add_bos_token=_adds_bos(get("add_bos_token"), str(kind)),
        special_token_ids=tuple(control),
    )


def _adds_bos(setting: object, kind: str) -> bool:
    """Tell whether plain text starts with the begin-of-text id; Llama 3 files may not say so."""
    return setting if isinstance(setting, bool) else kind in _WHOLE_WORDS


def tokenizer_document(
    kind: str, tokens: Sequence[str], merges: Sequence[str], types: Sequence[int]
) -> Json:
    """Return the tokenizer.json document of a byte-level pair vocabulary.

    `merges` are pairs of pieces with a space between them: byte-level pieces contain none.
    No template adds begin-of-text ids: the caller knows whether text starts a prompt.
    """
    cuts: list[Json] = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in _CUTS[kind]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_type != USER_DEFINED,
            }
            for index, token_type in enumerate(types)
            if token_type in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if kind in _NORMALIZED else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cuts, {**byte_level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind in _WHOLE_WORDS,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": list(merges),
        },
    }


def _strings(values: object) -> list[str] | None:
    """Return a list of strings, or None for anything else; checks elements, not only the list."""
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return None
