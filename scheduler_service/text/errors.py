"""Errors of the text modules.

TextError
├── TokenizerError      the executor's tokenizer document cannot be used
└── PromptError         the prompt cannot be turned into token ids
    └── ChatTemplateError   the model's chat template refused the conversation
"""


class TextError(Exception):
    """Root of the text errors."""


class TokenizerError(TextError):
    """The tokenizer document of a model cannot be used."""


class PromptError(TextError):
    """A prompt cannot be turned into token ids."""


class ChatTemplateError(PromptError):
    """A chat template failed or refused the conversation; the text says why."""
