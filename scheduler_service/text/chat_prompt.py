"""Conversations to prompts in which only the template writes control tokens.

A rendered conversation is one string, in which a control token that the template
wrote and the same characters inside a message look alike. To tell them apart,
messages are rendered in disguise: characters that could begin or end the
spelling of a control token are replaced by private-use characters that occur
nowhere else. Spellings found in the disguised rendering were written by the
template; the disguise is then taken off the text between them.

A template may look into the messages (to cut reasoning out of earlier turns, for
example) and be misled by the disguise. Then the disguised rendering, taken back,
differs from the plain one, and a thinner disguise is used: complete spellings,
and pieces of one at the ends of a message.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_service.text.chat_template import ChatTemplate, ChatTurn
from scheduler_service.text.errors import PromptError

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Supplementary Private Use Areas A and B.
_PRIVATE_USE = range(0xF0000, 0x10FFFE)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: plain text, or one control token."""

    text: str
    is_control: bool


def _unused_characters(texts: Sequence[str], count: int) -> list[str]:
    """Return `count` private-use characters that occur in none of the texts."""
    used = set().union(*texts) if texts else set()
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    try:
        return [next(unused) for _ in range(count)]
    except StopIteration:
        raise PromptError("[chat] messages must leave some private-use characters free") from None


def _overlap(spelling: str, text: str) -> int:
    """Return the length of the longest start of `spelling` with which `text` ends."""
    longest = min(len(spelling), len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(spelling[:n])), 0)


class ChatPrompt:
    """Renders conversations for one template and one set of control tokens."""

    def __init__(self, template: ChatTemplate, control_spellings: Sequence[str]) -> None:
        """Treat `control_spellings`, none empty, as control tokens where the template writes them.

        Of several spellings at one place the longest counts.
        """
        self._template = template
        self._spellings = sorted(set(control_spellings), key=lambda s: (-len(s), s))
        self._edges = sorted({edge for s in self._spellings for edge in (s[0], s[-1])})
        self._pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")

    def render(self, turns: Sequence[ChatTurn]) -> list[Segment]:
        """Return the rendered prompt in segments.

        Raises PromptError for an empty conversation or a role that is not a name, and
        ChatTemplateError when the template refuses the conversation.
        """
        if not turns:
            raise PromptError("[chat] a conversation must have at least one message, got none")
        for turn in turns:
            if not _ROLE.fullmatch(turn.role):
                raise PromptError(
                    "[chat] a role must be 1 to 64 letters, digits, '_', '.' or '-', "
                    f"got {turn.role!r}"
                )
        texts = [turn.content for turn in turns]
        masks = dict(
            zip(
                self._edges,
                _unused_characters([self._template.source, *texts], len(self._edges)),
                strict=True,
            )
        )
        rendered, unmask = self._render_disguised(turns, masks)
        segments: list[Segment] = []
        start = 0
        for match in self._pattern.finditer(rendered):
            if match.start() > start:
                segments.append(Segment(rendered[start : match.start()].translate(unmask), False))
            segments.append(Segment(match[0], True))
            start = match.end()
        if start < len(rendered):
            segments.append(Segment(rendered[start:].translate(unmask), False))
        return segments

    def _render_disguised(
        self, turns: Sequence[ChatTurn], masks: dict[str, str]
    ) -> tuple[str, dict[int, str]]:
        mask = str.maketrans(masks)
        unmask = {ord(masked): character for character, masked in masks.items()}
        full = self._render_with(turns, lambda text: text.translate(mask))
        if all(turn.content.translate(mask) == turn.content for turn in turns):
            return full, unmask
        if full.translate(unmask) == self._template.render(turns):
            return full, unmask
        return self._render_with(turns, lambda text: self._mask_spellings(text, mask)), unmask

    def _render_with(self, turns: Sequence[ChatTurn], disguise: Callable[[str], str]) -> str:
        return self._template.render(
            [ChatTurn(role=turn.role, content=disguise(turn.content)) for turn in turns]
        )

    def _mask_spellings(self, text: str, mask: dict[int, str]) -> str:
        """Disguise complete spellings in `text`, and pieces of one at its ends."""
        body = text.strip()
        start = len(text) - len(text.lstrip())
        head = max(_overlap(s[:0:-1], body[: len(s)][::-1]) for s in self._spellings)
        tail = max(_overlap(s[:-1], body[-len(s) :]) for s in self._spellings)
        head_end = start + head
        tail_start = max(head_end, start + len(body) - tail)
        text = (
            text[:head_end].translate(mask)
            + text[head_end:tail_start]
            + text[tail_start:].translate(mask)
        )
        return self._pattern.sub(lambda match: match[0].translate(mask), text)
