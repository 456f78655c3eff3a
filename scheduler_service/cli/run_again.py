"""The request in a trace run again, alone: what `isobatch explain` and `isobatch replay` share."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from scheduler_service.cli import output
from scheduler_service.cli.connection import connected_or_private
from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_INVALID, Failure
from scheduler_service.cli.options import address_option, own_model_option, private_server_options

if TYPE_CHECKING:
    from scheduler_service.client import Client
    from scheduler_service.tracing.compare import Comparison
    from scheduler_service.tracing.model import Trace


@dataclass(frozen=True, slots=True)
class Server:
    """Who runs it: the server at an address, or one that is started for this command."""

    address: str | None
    serve_privately: bool
    # With `serve_privately`; None for the trace's model and the configuration's values.
    model: str | None
    threads: int | None
    kv_memory_mb: int | None

    def run(self, trace: Trace, *, same_class: bool) -> tuple[Trace, bytes]:
        """Run the traced request and return the trace of that, read and as it came.

        Nothing is taken from cached prefixes. A request that was cut short is run to the same
        length. Fails unless the server has the trace's model, and where asked its numeric class.
        """
        if self.model is not None and not self.serve_privately:
            raise click.UsageError("--model needs --serve")
        with connected_or_private(
            self.address,
            serve_privately=self.serve_privately,
            model=self.model or trace.header.model,
            threads=self.threads,
            kv_memory_mb=self.kv_memory_mb,
        ) as (client, _):
            _check_same_model(client, trace, same_class=same_class)
            return _run(client, trace)


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say who runs it; the command gets them as its `server`."""

    @own_model_option
    @private_server_options
    @address_option
    @functools.wraps(function)
    def command(
        *args: Any,
        address: str | None,
        serve_privately: bool,
        model: str | None,
        threads: int | None,
        kv_memory_mb: int | None,
        **others: Any,
    ) -> None:
        function(
            *args, server=Server(address, serve_privately, model, threads, kv_memory_mb), **others
        )

    return command


def tell(first: Trace, second: Trace, found: Comparison, *heads: str, as_json: bool) -> int:
    """Print what was found, below `heads`, and return the command's exit code."""
    from scheduler_service.tracing.explain import plain, words

    if as_json:
        output.write_json(plain(first, second, found))
    else:
        for line in (*heads, *words(first, second, found)):
            click.echo(line)
    return 0 if found.is_equal else EXIT_FAILURE


def note_company(trace: Trace) -> None:
    """Warn where a run that should be alone had neighbours."""
    count = sum(step.num_neighbours > 0 for step in trace.steps)
    if count:
        output.note(f"The replay was not alone: other requests had rows in {count} of its steps.")


def _check_same_model(client: Client, trace: Trace, *, same_class: bool) -> None:
    """Fail unless the server has the trace's model, and where asked its numeric class."""
    header = trace.header
    models = {each.weights_digest: each for each in client.list_models()}
    model = models.get(header.weights_digest)
    if model is None:
        served = ", ".join(f"{each.model} ({each.weights_digest[:12]})" for each in models.values())
        raise Failure(
            f"[replay] the server must have the weights of {header.model} "
            f"({header.weights_digest[:12]}), got {served or 'no model'}",
            EXIT_INVALID,
        )
    if same_class and model.numeric_class != header.numeric_class:
        raise Failure(
            f"[replay] the server must compute in class {header.numeric_class}, "
            f"got {model.numeric_class}; isobatch explain FILE --solo compares across classes",
            EXIT_INVALID,
        )


def _run(client: Client, trace: Trace) -> tuple[Trace, bytes]:
    from scheduler_service.client import GenerationParams
    from scheduler_service.tracing.compare import is_cut_short
    from scheduler_service.wire import trace as wire

    header, params = trace.header, trace.header.sampling
    max_tokens = len(trace.tokens) if is_cut_short(trace) else header.max_tokens
    if max_tokens < 1:
        raise Failure("[replay] the trace must hold a token, got none", EXIT_INVALID)
    completion = client.complete(
        header.prompt_token_ids,
        GenerationParams(
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            logit_bias=dict(params.logit_bias),
            stop=header.stop,
            stop_token_ids=header.stop_token_ids,
            ignore_eos=header.ignore_eos,
            include_special_tokens=header.include_special_tokens,
            # Nobody else's prefix has this salt.
            cache_salt=f"replay-{uuid.uuid4()}",
            trace=True,
            trace_kv=header.has_kv_digests,
        ),
    )
    if not completion.trace:
        raise Failure("[trace] the server must know traces, got none from it", EXIT_FAILURE)
    return wire.read(completion.trace), completion.trace
