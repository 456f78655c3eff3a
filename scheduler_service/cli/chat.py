"""`isobatch chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected_or_private
from scheduler_service.cli.failures import from_client_error
from scheduler_service.cli.options import (
    address_option,
    chat_options,
    generation_params,
    private_server_options,
)
from scheduler_service.cli.typed_lines import TypedLines

if TYPE_CHECKING:
    from scheduler_service.client import ChatMessage, Client, GenerationParams

_HELP: Final = "/exit ends, /reset starts anew. Ctrl-C stops an answer, Ctrl-D ends."
_PROMPT: Final = "> "


@click.command("chat")
@chat_options
@private_server_options
@address_option
def command(
    model: str,
    system: str,
    serve_privately: bool,
    threads: int | None,
    kv_memory_mb: int | None,
    address: str | None,
    **sampling: Any,
) -> None:
    """Talk with a model.

    /exit ends and /reset starts anew; Ctrl-C stops the answer, not the program. An answer ends at
    --max-tokens, and a line then says so.
    """
    # Somebody sits and waits.
    sampling["priority"] = sampling["priority"] or "interactive"
    with connected_or_private(
        address,
        serve_privately=serve_privately,
        model=model,
        threads=threads,
        kv_memory_mb=kv_memory_mb,
    ) as (client, served_model):
        conversation = Conversation(
            client, generation_params(**sampling), model=served_model, system=system
        )
        output.note(_HELP)
        _talk(conversation, _line_reader())


class Conversation:
    """The turns so far, and how the next one is asked for."""

    def __init__(
        self, client: Client, params: GenerationParams, *, model: str, system: str
    ) -> None:
        self._client = client
        self._params = params
        self._model = model
        self._system = system
        self._turns: list[ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        from scheduler_service.client import ChatMessage

        self._turns = [ChatMessage("system", self._system)] if self._system else []

    def say(self, text: str) -> None:
        """Ask with one more turn and stream the answer to standard output.

        An answer stopped by Ctrl-C stays in the conversation as far as it came; a turn that failed
        leaves no trace, so that the next one may succeed.
        """
        from scheduler_service.client import ChatMessage, IsobatchError

        turns = [*self._turns, ChatMessage("user", text)]
        try:
            with self._client.chat(turns, self._params, model=self._model) as stream:
                cut = ""
                with contextlib.suppress(KeyboardInterrupt):
                    for event in stream:
                        output.write_text(event.text)
                    cut = output.cut_line(
                        stream.completion(), self._params.max_tokens, self._client
                    )
                click.echo()
                if cut:
                    output.note(cut)
        except KeyboardInterrupt:
            # Before the stream began: nothing was answered.
            click.echo()
        except IsobatchError as error:
            from_client_error(error).show()
        else:
            self._turns = [*turns, ChatMessage("assistant", stream.text)]


def _talk(conversation: Conversation, read_line: Callable[[], str]) -> None:
    while True:
        try:
            text = read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        except UnicodeDecodeError:
            output.note("A line must be UTF-8; this one was left out.")
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            output.note("The conversation starts anew.")
        elif text.startswith("/"):
            output.note(_HELP)
        elif text:
            conversation.say(text)


def _line_reader() -> Callable[[], str]:
    """Return a function that asks for a line: with editing and history where a person types."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain_reader()
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    path = _history_path()
    history: History = FileHistory(str(path)) if path else InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history)
    return lambda: session.prompt(_PROMPT)


def _plain_reader() -> Callable[[], str]:
    try:
        descriptor = sys.stdin.fileno()
    except OSError:
        # No file, as where a program calls this one.
        return _read_plain_line
    return TypedLines(descriptor).read_line


def _read_plain_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _history_path() -> Path | None:
    """Return the file of past prompts, for this user alone, or None where none can be kept."""
    import platformdirs

    path = Path(platformdirs.user_state_dir("isobatch")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
    except OSError:
        return None
    return path
