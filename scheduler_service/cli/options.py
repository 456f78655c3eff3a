"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from scheduler_service.cli.failures import JSON_KEY

if TYPE_CHECKING:
    from scheduler_service.client import GenerationParams

# The small model that `isobatch pull` can bring to any machine.
EMBEDDED_MODEL: Final = "smollm2-135m-instruct"

_Function = TypeVar("_Function", bound=Callable[..., Any])

address_option = click.option(
    "--address",
    envvar="ISOBATCH_ADDRESS",
    metavar="ADDRESS",
    help="Where the scheduler listens: unix:PATH or HOST:PORT. "
    "Default: this user's server on this machine. Environment: ISOBATCH_ADDRESS.",
)


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    # Errors follow the format of the answer, also those raised before the command runs.
    ctx.meta[JSON_KEY] = value
    return value


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_note_json,
    help="Print JSON to standard output, and errors as JSON to standard error.",
)

_WHOM_OPTIONS: Final = (
    click.option("-m", "--model", default="", help="Model; default: the server's."),
    click.option("--system", default="", metavar="TEXT", help="System message."),
)
_SAMPLING_OPTIONS: Final = (
    click.option("-t", "--temperature", type=float, help="0 is greedy, the default."),
    click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the smallest set with this probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely, relatively."),
    click.option("--seed", type=int, help="Seed of the draw; default: the server draws one."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable."),
    click.option(
        "--priority",
        type=click.Choice(["interactive", "normal", "batch"]),
        help="How urgent it is.",
    ),
    click.option(
        "--client",
        "client_id",
        default="",
        metavar="NAME",
        help="Whose share of the server it takes from; default: this connection's.",
    ),
    click.option(
        "--no-speculation",
        "disable_speculation",
        is_flag=True,
        help="Draft no tokens: slower on text that repeats, and the same text.",
    ),
)

_GENERATION_OPTIONS: Final = (
    *_WHOM_OPTIONS,
    click.option("-n", "--max-tokens", type=int, help="Most tokens to generate."),
    *_SAMPLING_OPTIONS,
)

# A small model may talk for ever, and nobody who chats says beforehand how long an answer may be.
_CHAT_MAX_TOKENS: Final = 1000
_CHAT_OPTIONS: Final = (
    *_WHOM_OPTIONS,
    click.option(
        "-n",
        "--max-tokens",
        type=click.IntRange(1),
        default=_CHAT_MAX_TOKENS,
        show_default=True,
        envvar="ISOBATCH_CHAT_MAX_TOKENS",
        show_envvar=True,
        help="Most tokens of an answer.",
    ),
    *_SAMPLING_OPTIONS,
)

_TRACE_OPTIONS: Final = (
    click.option(
        "--trace",
        "trace_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Trace the request into this file; see isobatch explain, replay and trace.",
    ),
    click.option(
        "--trace-kv", is_flag=True, help="With --trace: digests of the keys and values as well."
    ),
)

own_model_option = click.option(
    "-m",
    "--model",
    metavar="NAME_OR_PATH",
    help="With --serve: its model; default: the one that the trace names.",
)

_PRIVATE_SERVER_OPTIONS: Final = (
    click.option(
        "--serve",
        "serve_privately",
        is_flag=True,
        help="Start a server for this command alone, with --model NAME_OR_PATH.",
    ),
    click.option("--threads", type=click.IntRange(1), help="Threads, with --serve."),
    click.option("--kv-memory-mb", type=click.IntRange(1), help="KV cache, with --serve."),
)


def _all(options: tuple[Callable[[Any], Any], ...]) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


generation_options = _all(_GENERATION_OPTIONS)
chat_options = _all(_CHAT_OPTIONS)
trace_options = _all(_TRACE_OPTIONS)
private_server_options = _all(_PRIVATE_SERVER_OPTIONS)


def generation_params(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    priority: str | None,
    client_id: str,
    disable_speculation: bool,
) -> GenerationParams:
    """Return the SDK's parameters for the values of `generation_options`."""
    from scheduler_service.client import GenerationParams, Priority

    return GenerationParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        priority=None if priority is None else Priority(priority),
        client_id=client_id,
        disable_speculation=disable_speculation,
    )
