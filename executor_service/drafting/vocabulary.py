"""Whether two models speak of the same tokens: by the text of each id.

Widths of logits say nothing: files pad theirs, each to its own size. Ids that only one of two
models has must be padding; anything else is another tokenizer.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from executor_service.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

# The name that converters of model files give to padding ids.
_PADDING: Final = re.compile(r"\[PAD\d+\]")


def token_texts(tokenizer_json: bytes) -> dict[int, str]:
    """Return the text of each id of a tokenizer.json document."""
    document = json.loads(tokenizer_json)
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        texts = {int(index): str(text) for text, index in vocabulary.items()}
    else:  # pairs of text and score
        texts = {index: str(pair[0]) for index, pair in enumerate(vocabulary)}
    for token in document.get("added_tokens") or ():
        texts[int(token["id"])] = str(token["content"])
    return texts


def common_ids(target_json: bytes, draft_json: bytes) -> int:
    """Return the number n of ids that both tokenizers give the same text: 0..n - 1.

    Raises ModelError where an id has another text, or is a token of one of them alone.
    """
    target = token_texts(target_json)
    draft = target if draft_json == target_json else token_texts(draft_json)
    for index in sorted(target.keys() & draft.keys()):
        if target[index] != draft[index]:
            raise ModelError(
                f"[draft] token {index} must be {target[index]!r:.60} as in the target model, "
                f"got {draft[index]!r:.60} in the draft model"
            )
    _require_padding(target, draft, "draft")
    _require_padding(draft, target, "target")
    shared = target.keys() & draft.keys()
    return next(index for index in range(len(shared) + 1) if index not in shared)


def _require_padding(texts: Mapping[int, str], others: Mapping[int, str], other: str) -> None:
    """Raise where `texts` has a token that `others` lacks."""
    alone = [i for i in sorted(texts.keys() - others.keys()) if not _PADDING.fullmatch(texts[i])]
    if alone:
        raise ModelError(
            f"[draft] both models must have the same tokens, got {len(alone)} that the {other} "
            f"model lacks, the first {alone[0]}: {texts[alone[0]]!r:.60}"
        )
