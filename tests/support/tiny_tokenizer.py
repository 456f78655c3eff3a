"""A small byte-level BPE tokenizer, trained in place, with chat control tokens."""

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scheduler_service.text.tokenizer import TokenizerSource

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
BOS_ID = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXTS = (
    "the quick brown fox jumps over the lazy dog and the other dog",
    "user assistant system hello world this is a test of the tokenizer",
    "stop stopping stopped STOP end ending",
    "naïve café über straße 日本語 日本 🦊🦊 👩‍👩‍👧",
)


@cache
def tokenizer_document() -> bytes:
    """Return the tokenizer document: 3 control tokens, 256 bytes and some merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer.to_str().encode()


@cache
def vocab_size() -> int:
    """Return the number of tokens."""
    return int(tokenizers.Tokenizer.from_str(tokenizer_document().decode()).get_vocab_size())


def tokenizer_source(**changes: Any) -> TokenizerSource:
    """Return the tokenizer as an executor would send it, with fields replaced."""
    fields: dict[str, Any] = {
        "document": tokenizer_document(),
        "chat_template": CHAT_TEMPLATE,
        "eos_token_ids": (EOS_ID,),
        "bos_token_id": None,
        "add_bos_token": False,
        "special_token_ids": (0, 1, 2),
    }
    return TokenizerSource(**(fields | changes))


def edited_document(**changes: Any) -> bytes:
    """Return the tokenizer document with top-level keys replaced."""
    document = json.loads(tokenizer_document())
    document.update(changes)
    return json.dumps(document).encode()
