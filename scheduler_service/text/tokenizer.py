"""A model's tokenizer: prompts to token ids, token ids to text.

Built from what the executor sends; no files are read. Text that a client wrote
never becomes a control token: the encoder takes their spellings for text, and only
the chat template's own become control tokens (see chat_prompt).
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from scheduler_service.text.chat_prompt import ChatPrompt
from scheduler_service.text.chat_template import ChatTemplate, ChatTurn
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.errors import ChatTemplateError, PromptError, TokenizerError
from scheduler_service.text.pieces import build_pieces

# Texts from this length on are encoded without holding up other threads.
_BATCH_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What the executor says about a model's text."""

    # A document for the `tokenizers` library.
    document: bytes
    # Jinja source; empty when the model has no chat template.
    chat_template: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    # True when prompts start with the begin-of-text id.
    add_bos_token: bool
    special_token_ids: tuple[int, ...]


class Tokenizer:
    """Encodes prompts and makes detokenizers; safe to use from several threads."""

    def __init__(self, source: TokenizerSource) -> None:
        """Build from `source`; raises TokenizerError when it cannot be used."""
        try:
            document = json.loads(source.document)
            added = document.get("added_tokens") or []
            control = {t["id"]: t["content"] for t in added if t.get("special")}
            named = set(source.special_token_ids)
            control.update((t["id"], t["content"]) for t in added if t["id"] in named)
            data = source.document
            marked = [token for token in added if token["id"] in control]
            if any(not t.get("special") for t in marked) or any(
                document.get(key) for key in ("truncation", "padding")
            ):
                for token in marked:
                    token["special"] = True
                document["truncation"] = document["padding"] = None
                data = json.dumps(document).encode()
            self._encoder = tokenizers.Tokenizer.from_buffer(data)
            # The name misleads: true means that special tokens in text are text.
            self._encoder.encode_special_tokens = True
            decoder = document.get("decoder")
        # The library raises bare exceptions for documents it does not understand.
        except Exception as error:
            raise TokenizerError(f"[tokenizer] the document must be readable: {error}") from error
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        spellings = {token_id: token for token, token_id in vocabulary.items()}
        control.update((i, spellings[i]) for i in named if i in spellings)
        vocabulary.update((content, token_id) for token_id, content in control.items())
        self._pieces = build_pieces(vocabulary, decoder)
        self._control_ids = frozenset(control)
        self._control_by_spelling = {content: i for i, content in control.items() if content}
        self._lone_control = re.compile(
            "|".join(map(re.escape, sorted(self._control_by_spelling, key=len, reverse=True)))
            or r"(?!)"
        )
        self.eos_token_ids = frozenset(source.eos_token_ids)
        self._first_ids = (
            [source.bos_token_id]
            if source.add_bos_token and source.bos_token_id is not None
            else []
        )
        self._chat = self._build_chat(source, control) if source.chat_template else None

    def _build_chat(self, source: TokenizerSource, control: dict[int, str]) -> ChatPrompt:
        eos = next(iter(source.eos_token_ids), -1)
        try:
            template = ChatTemplate(
                source.chat_template,
                bos_token=control.get(
                    -1 if source.bos_token_id is None else source.bos_token_id, ""
                ),
                eos_token=control.get(eos, ""),
            )
        except ChatTemplateError as error:
            raise TokenizerError(str(error)) from error
        return ChatPrompt(template, list(self._control_by_spelling))

    @property
    def has_chat_template(self) -> bool:
        """True when conversations can be rendered."""
        return self._chat is not None

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a plain-text prompt, the begin-of-text id first where the model
        wants it. Control tokens spelled in `text` are encoded as ordinary characters.
        """
        return [*self._first_ids, *self._encode_plain(text)]

    def encode_chat(self, turns: Sequence[ChatTurn]) -> tuple[list[int], str]:
        """Return (ids, rendered prompt) of a conversation.

        Raises ChatTemplateError when the model has no template or its template refuses
        the conversation, and PromptError when the conversation is malformed.
        """
        if self._chat is None:
            raise ChatTemplateError("[chat] the model has no chat template; send text instead")
        segments = self._chat.render(turns)
        ids: list[int] = []
        for segment in segments:
            if segment.is_control:
                ids.append(self._control_by_spelling[segment.text])
            else:
                ids.extend(self._encode_plain(segment.text))
        if ids[:1] != self._first_ids:
            ids = [*self._first_ids, *ids]
        return ids, "".join(segment.text for segment in segments)

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._encode_whole(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself spells a control token. Cutting every spelling after its first
        # character leaves no token that could span one.
        cuts = [match.start() + 1 for match in self._lone_control.finditer(text)]
        borders = [0, *cuts, len(text)]
        pieces = (text[a:b] for a, b in itertools.pairwise(borders))
        ids = [token_id for piece in pieces for token_id in self._encode_whole(piece)]
        if not self._control_ids.isdisjoint(ids):
            raise PromptError("[tokenizer] text must not consist of control tokens")
        return ids

    def _encode_whole(self, text: str) -> list[int]:
        if len(text) < _BATCH_CHARACTERS:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        else:
            # The library lets other threads run only while it encodes a batch: a megabyte takes
            # it a second, in which no stream would get its tokens.
            ids = self._encoder.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def detokenizer(self, *, include_special_tokens: bool = False) -> Detokenizer:
        """Return a detokenizer for one stream of output."""
        skipped = frozenset[int]() if include_special_tokens else self._control_ids
        return Detokenizer(self._pieces, skipped)

    def decode(self, token_ids: Iterable[int], *, include_special_tokens: bool = False) -> str:
        """Return the text of all ids at once."""
        detokenizer = self.detokenizer(include_special_tokens=include_special_tokens)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()
