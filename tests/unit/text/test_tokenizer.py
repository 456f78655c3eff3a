"""Prompts to ids: fidelity for honest text, no control tokens from a client's text."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.text.chat_template import ChatTurn
from scheduler_service.text.errors import ChatTemplateError, PromptError, TokenizerError
from scheduler_service.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import (
    BOS_ID,
    CHAT_TEMPLATE,
    SPECIALS,
    edited_document,
    tokenizer_document,
    tokenizer_source,
)

LIBRARY = tokenizers.Tokenizer.from_str(tokenizer_document().decode())
TOKENIZER = Tokenizer(tokenizer_source())
CONTROL_IDS = {0, 1, 2}
_THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
)

_PARTS = st.sampled_from(
    [*SPECIALS, "<|im_", "start|>", "end|>", "<|", "|>", "<", ">", "</think>", " ", "\n", "hi"]
)
_CONTENT = st.lists(_PARTS, max_size=6).map("".join)


def _honest_ids(turns: list[ChatTurn]) -> list[int]:
    """Encode each stretch between the template's control tokens as plain text."""
    ids: list[int] = []
    for role, content in [*((t.role, t.content) for t in turns), ("assistant", None)]:
        body = f"{role}\n" if content is None else f"{role}\n{content}"
        ids += [1, *TOKENIZER.encode_text(body)]
        if content is not None:
            ids += [2, *TOKENIZER.encode_text("\n")]
    return ids


@given(st.text(max_size=40))
def test_plain_text_is_encoded_as_the_library_does(text: str) -> None:
    if not any(special in text for special in SPECIALS):
        assert TOKENIZER.encode_text(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(_CONTENT)
def test_text_never_becomes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert CONTROL_IDS.isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.builds(ChatTurn, st.sampled_from(["user", "system"]), _CONTENT), min_size=1,
                max_size=3))  # fmt: skip
def test_control_tokens_of_a_chat_are_the_template_s_alone(turns: list[ChatTurn]) -> None:
    ids, rendered = TOKENIZER.encode_chat(turns)
    assert ids == _honest_ids(turns)
    assert TOKENIZER.decode(ids, include_special_tokens=True) == rendered
    expected = "".join(f"<|im_start|>{t.role}\n{t.content}<|im_end|>\n" for t in turns)
    assert rendered == expected + "<|im_start|>assistant\n"


def test_honest_chat_equals_the_library_on_the_whole_rendering() -> None:
    """Text of template and message that touch are encoded together, as in training."""
    ids, rendered = TOKENIZER.encode_chat([ChatTurn("user", "\n\nhello <b>world</b>")])
    assert ids == LIBRARY.encode(rendered, add_special_tokens=False).ids


@given(st.lists(_CONTENT, min_size=1, max_size=3))
def test_a_template_that_cuts_messages_still_sees_the_real_text(contents: list[str]) -> None:
    tokenizer = Tokenizer(tokenizer_source(chat_template=_THINKING_TEMPLATE))
    turns = [ChatTurn("user", content) for content in contents]
    ids, rendered = tokenizer.encode_chat(turns)
    assert ids.count(1) == ids.count(2) == len(turns)
    assert 0 not in ids
    kept = [content.split("</think>")[-1].strip() for content in contents]
    assert rendered == "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in kept)


def test_a_spelling_made_of_two_messages_is_text() -> None:
    tokenizer = Tokenizer(
        tokenizer_source(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    ids, rendered = tokenizer.encode_chat([ChatTurn("user", "<|im_"), ChatTurn("user", "start|>")])
    assert rendered == "<|im_start|>"
    assert CONTROL_IDS.isdisjoint(ids)


def test_a_control_token_that_the_template_makes_of_a_role_counts() -> None:
    tokenizer = Tokenizer(
        tokenizer_source(chat_template="{{ '<|' + messages[0].role + '|>' + messages[0].content }}")
    )
    ids, _ = tokenizer.encode_chat([ChatTurn("im_start", "x")])
    assert ids[0] == 1


@pytest.mark.parametrize("role", ["", "a b", "user<|im_end|>", "x" * 65, "user\n"])
def test_a_role_that_is_no_name_is_refused(role: str) -> None:
    with pytest.raises(PromptError, match=r"\[chat\] a role must be"):
        TOKENIZER.encode_chat([ChatTurn(role, "x")])


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(PromptError, match="at least one message"):
        TOKENIZER.encode_chat([])


def test_a_model_without_a_template_refuses_conversations() -> None:
    tokenizer = Tokenizer(tokenizer_source(chat_template=""))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([ChatTurn("user", "x")])


def test_private_use_characters_in_messages_survive() -> None:
    content = "\U000f0000<\U000f0001>|\U000f0002"
    _, rendered = TOKENIZER.encode_chat([ChatTurn("user", content)])
    assert content in rendered


def test_the_begin_token_comes_once() -> None:
    source = tokenizer_source(
        bos_token_id=BOS_ID, add_bos_token=True, chat_template="{{ bos_token }}" + CHAT_TEMPLATE
    )
    ids, rendered = Tokenizer(source).encode_chat([ChatTurn("user", "x")])
    assert ids[:2] == [BOS_ID, 1]
    assert rendered.startswith("<|endoftext|><|im_start|>")
    bare = tokenizer_source(bos_token_id=BOS_ID, add_bos_token=True)
    assert Tokenizer(bare).encode_chat([ChatTurn("user", "x")])[0][:2] == [BOS_ID, 1]
    assert Tokenizer(bare).encode_text("x")[0] == BOS_ID
    without = tokenizer_source(bos_token_id=BOS_ID)
    assert BOS_ID not in Tokenizer(without).encode_text("x")


def test_added_tokens_that_are_not_control_tokens_stay_tokens() -> None:
    document = json.loads(tokenizer_document())
    extra_id = 1000
    added = document["added_tokens"]
    plain = {**added[0], "id": extra_id, "content": "<tool>", "special": False}
    hidden = {**added[0], "id": extra_id + 1, "content": "<hidden>", "special": False}
    # Ids of added tokens follow the vocabulary without a gap.
    size = len(document["model"]["vocab"])
    plain["id"], hidden["id"] = size, size + 1
    document["added_tokens"] = [*added, plain, hidden]
    tokenizer = Tokenizer(
        tokenizer_source(
            document=json.dumps(document).encode(), special_token_ids=(0, 1, 2, size + 1)
        )
    )
    assert size in tokenizer.encode_text("a<tool>b")
    assert tokenizer.decode(tokenizer.encode_text("a<tool>b")) == "a<tool>b"
    assert size + 1 not in tokenizer.encode_text("a<hidden>b")
    assert tokenizer.decode([size, size + 1]) == "<tool>"


def test_a_vocabulary_that_spells_a_control_token_is_cut_around_it() -> None:
    """With whole-word lookup a word of the text may be a control token's spelling."""
    document = json.loads(tokenizer_document())
    document["model"]["ignore_merges"] = True
    document["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    tokenizer = Tokenizer(tokenizer_source(document=json.dumps(document).encode()))
    ids = tokenizer.encode_text("<|im_start|>")
    assert CONTROL_IDS.isdisjoint(ids)
    assert tokenizer.decode(ids) == "<|im_start|>"


def test_byte_fallback_vocabularies_give_spaces_and_bytes() -> None:
    vocabulary = {"\u2581hello": 0, "<0xE6>": 1, "<0x97>": 2, "<0xA5>": 3, "!": 4}
    document: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
    }  # fmt: skip
    tokenizer = Tokenizer(
        tokenizer_source(document=json.dumps(document).encode(), special_token_ids=())
    )
    assert tokenizer.decode([0, 1, 2, 3, 4]) == " hello\u65e5!"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"not json", "document must be readable"),
        (b"{}", "document must be readable"),
        (edited_document(decoder=None), "got none"),
        (edited_document(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
         "WordPiece"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_used_are_refused(document: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(tokenizer_source(document=document))


def test_a_broken_template_is_an_error_of_the_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        Tokenizer(tokenizer_source(chat_template="{% for %}"))
