"""Renders a conversation with the chat template of a model.

Templates come with model files, so they run in Jinja's immutable sandbox: no
attribute of Python objects beyond the harmless ones, no changes to what is
passed in, loops over `range` bounded. The helpers are those that published
templates expect: `raise_exception`, `strftime_now`, `tojson`, loop controls.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_service.text.errors import ChatTemplateError


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str


class _GenerationMark(Extension):
    """Accepts `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; raises ChatTemplateError when it is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMark]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda pattern: now().strftime(pattern),
            bos_token=bos_token,
            eos_token=eos_token,
        )
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"[chat_template] the model's template does not compile: {error}"
            ) from error

    def render(self, turns: Sequence[ChatTurn]) -> str:
        """Return the prompt that asks for the next assistant turn.

        Raises ChatTemplateError with the template's own words when it refuses the
        conversation or fails.
        """
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            # Templates test tools and documents against none, so they must be defined.
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None
            )
        # A template is a program of somebody else: whatever it raises is about the conversation
        # it was given and never about the service.
        except Exception as error:
            raise ChatTemplateError(
                f"[chat_template] the model's template refused the conversation: {error}"
            ) from error
