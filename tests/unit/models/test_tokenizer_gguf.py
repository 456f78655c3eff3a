"""Tokenizers built from GGUF metadata: cuts by kind, control tokens, ids, refusals."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from executor_service.errors import ModelError
from executor_service.models.tokenizer_gguf import tokenizer_document, tokenizer_from_gguf

ALPHABET = sorted(ByteLevel.alphabet())


def _metadata(**changes: object) -> dict[str, object]:
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<user>",
        *ALPHABET,
        "he",
        "ll",
        "hell",
    ]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "merges": ["h e", "l l", "he ll"],
        "eos_token_id": 2,
        "bos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def _tokenizer(**changes: object) -> Tokenizer:
    return Tokenizer.from_str(
        tokenizer_from_gguf(_metadata(**changes), "x").tokenizer_json.decode()
    )


def _pieces(kind: str, text: str) -> list[str]:
    """The pieces that a text is cut into before any merge."""
    document = tokenizer_document(kind, ["a"], [], [1])
    tokenizer = Tokenizer.from_str(json.dumps(document))
    pieces = []
    pre_tokenizer, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    assert pre_tokenizer is not None
    normal = normalizer.normalize_str(text) if normalizer is not None else text
    for _, (start, stop) in pre_tokenizer.pre_tokenize_str(normal):
        pieces.append(normal[start:stop])
    return pieces


# Worked out by hand from each rule's definition.
CUTS = [
    ("gpt-2", "I'll pay 1234 now", ["I", "'ll", " pay", " 1234", " now"]),
    ("gpt-2", "a  b", ["a", " ", " b"]),
    ("gpt-2", "x\n\ny", ["x", "\n", "\n", "y"]),
    ("gpt-2", "I'LL", ["I", "'", "LL"]),
    ("smollm", "I'll pay 1234 now", ["I", "'ll", " pay", " ", "1", "2", "3", "4", " now"]),
    ("smollm", "v2x", ["v", "2", "x"]),
    ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
    ("qwen2", "(foo) bar!\n\nz", ["(foo", ")", " bar", "!\n\n", "z"]),
    ("qwen2", "cafe\u0301", ["café"]),
    ("llama-bpe", "12345 a", ["123", "45", " a"]),
    ("llama3", "x = 1000000;", ["x", " =", " ", "100", "000", "0", ";"]),
    ("llama-bpe", "a\r\n  b", ["a", "\r\n", " ", " b"]),
    ("default", "foo, 12345 $x", ["foo", ",", " ", "123", "45", " ", "$", "x"]),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CUTS)
def test_cuts(kind: str, text: str, expected: list[str]) -> None:
    assert _pieces(kind, text) == expected


@pytest.mark.parametrize(
    "kind", ["gpt-2", "gpt2", "smollm", "qwen2", "llama-bpe", "llama3", "default"]
)
@pytest.mark.parametrize(
    "text", ["", "naïve café\n\n\tx  ", "日本語 🦊👩‍👩‍👧 1½ ²", "\x00\x7f a\u00a0b", "'s'S 'll"]
)
def test_text_comes_back(kind: str, text: str) -> None:
    tokenizer = _tokenizer(pre=kind)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_apply_in_order() -> None:
    assert _tokenizer().encode("hello").tokens == ["hell", "o"]
    assert _tokenizer(merges=["l l", "h e"]).encode("hello").tokens == ["he", "ll", "o"]


def test_llama3_takes_whole_words_of_the_vocabulary() -> None:
    assert _tokenizer(merges=[], pre="llama-bpe").encode("hell").tokens == ["hell"]
    assert _tokenizer(merges=[], pre="smollm").encode("hell").tokens == ["h", "e", "l", "l"]


def test_control_tokens_are_special_and_user_tokens_are_whole() -> None:
    tokenizer = _tokenizer()
    encoded = tokenizer.encode("<|im_start|>a<user>")
    assert encoded.tokens == ["<|im_start|>", "a", "<user>"]
    assert tokenizer.decode(encoded.ids) == "a<user>"


def test_ids_and_flags() -> None:
    data = tokenizer_from_gguf(_metadata(eot_token_id=5, add_bos_token=True), "x")
    assert data.eos_token_ids == (0, 2, 5)  # the named ones, and control tokens known to end a text
    assert (data.bos_token_id, data.add_bos_token) == (1, True)
    assert data.special_token_ids == (0, 1, 2)
    assert data.chat_template == ""


def test_llama3_adds_bos_unless_the_file_says_otherwise() -> None:
    for setting, pre, expected in (
        (None, "llama-bpe", True),
        (False, "llama-bpe", False),
        (None, "smollm", False),
        (True, "smollm", True),
    ):
        data = tokenizer_from_gguf(_metadata(add_bos_token=setting, pre=pre), "x")
        assert data.add_bos_token is expected


def test_a_missing_kind_is_the_default_one() -> None:
    assert (
        _tokenizer(pre=None).encode("123456").tokens
        == _tokenizer(pre="default").encode("123456").tokens
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "llama"}, r"ggml.model must be gpt2 \(byte-level pairs\), got 'llama': x"),
        ({"pre": "chatglm-bpe"}, "ggml.pre must be one of gpt-2, .* got 'chatglm-bpe'"),
        ({"tokens": ["a", "a"]}, "tokens must be a list of different strings"),
        ({"tokens": 3}, "tokens must be a list of different strings"),
        ({"merges": ["abc"]}, "merges must be pairs"),
        ({"merges": ["h e", "h zz"]}, "merges must be of tokens, and give tokens, got 'h zz'"),
        ({"merges": ["h h"]}, "merges must be of tokens, and give tokens, got 'h h'"),
        ({"token_type": [1]}, "token_type must have"),
        ({"eos_token_id": 10**6}, "eos_token_id must be below"),
        ({"bos_token_id": "1"}, "bos_token_id must be below"),
    ],
)
def test_refusals(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        tokenizer_from_gguf(_metadata(**changes), "x")
