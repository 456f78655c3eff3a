"""Bug row B16: models that pad their vocabularies fit together, models of other tokens do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_service.drafting.vocabulary import common_ids, token_texts
from executor_service.errors import ModelError

TEXTS = ["<|end|>", "a", "b", "ab"]


def document(texts: list[str], **changes: Any) -> bytes:
    """A tokenizer.json with these tokens; the first is an added one."""
    vocabulary = {text: index for index, text in enumerate(texts) if index}
    added = [{"id": 0, "content": texts[0]}]
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added, **changes}).encode()


def test_texts_are_those_of_the_vocabulary_and_the_added_tokens() -> None:
    assert token_texts(document(TEXTS)) == dict(enumerate(TEXTS))
    pairs = [[text, 0.5] for text in TEXTS]
    assert token_texts(document(TEXTS, model={"vocab": pairs})) == dict(enumerate(TEXTS))


@pytest.mark.parametrize(("target", "draft"), [(0, 0), (3, 0), (0, 3), (2, 5)])
def test_b16_padding_alone_may_differ(target: int, draft: int) -> None:
    def padded(count: int) -> bytes:
        return document([*TEXTS, *(f"[PAD{index}]" for index in range(4, 4 + count))])

    assert common_ids(padded(target), padded(draft)) == 4 + min(target, draft)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (["<|end|>", "a", "c", "ab"], "token 2 must be 'b' as in the target model, got 'c'"),
        (TEXTS[:3], "got 1 that the draft model lacks, the first 3: 'ab'"),
        ([*TEXTS, "new"], "got 1 that the target model lacks, the first 4: 'new'"),
        (
            ["<|eot|>", *TEXTS[1:]],
            "token 0 must be '<|end|>' as in the target model, got '<|eot|>'",
        ),
    ],
)
def test_b16_a_real_difference_is_refused_with_its_reason(draft: list[str], reason: str) -> None:
    with pytest.raises(ModelError, match=r"\[draft\] ") as error:
        common_ids(document(TEXTS), document(draft))
    assert reason in str(error.value)


def test_an_id_that_both_lack_ends_what_they_have_in_common() -> None:
    texts = {"a": 0, "b": 1, "d": 3}
    raw = json.dumps({"model": {"vocab": texts}}).encode()
    assert common_ids(raw, raw) == 2
