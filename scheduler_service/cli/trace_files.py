"""Trace files on the command line, and the request in one run again, alone."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scheduler_service.cli.failures import EXIT_FAILURE, EXIT_INVALID, EXIT_USAGE, Failure

if TYPE_CHECKING:
    from scheduler_service.client import Client
    from scheduler_service.tracing.model import Trace


def write_trace(path: Path, data: bytes) -> None:
    """Write a trace for this user alone: it holds the prompt."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise Failure(
            f"[trace] the file must be writable, got {path}: {error.strerror}", EXIT_FAILURE
        ) from None
    if not data:
        raise Failure("[trace] the server must know traces, got none from it", EXIT_FAILURE)


def read_trace(path: Path) -> Trace:
    """Return the trace in a file."""
    from scheduler_service.wire import trace as wire

    try:
        return wire.read(path.read_bytes())
    except OSError as error:
        raise Failure(
            f"[trace] the file must be readable, got {path}: {error.strerror}", EXIT_USAGE
        ) from None
    except wire.TraceFormatError as error:
        raise Failure(f"{error}, got {path}", EXIT_USAGE) from None


def own_model(model: str | None, trace: Trace, *, serve_privately: bool) -> str:
    """Return the model of a server that is started for a trace: `model`, else the trace's."""
    if model is not None and not serve_privately:
        raise click.UsageError("--model needs --serve")
    return model or trace.header.model


def check_same_model(client: Client, trace: Trace, *, same_class: bool) -> None:
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


def run_again(client: Client, trace: Trace) -> tuple[Trace, bytes]:
    """Run the traced request and return the trace of that, read and as it came.

    Nothing is taken from cached prefixes. A request that was cut short is run to the same length.
    """
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


def company(trace: Trace) -> str:
    """Return a warning where a run that should be alone had neighbours, else nothing."""
    count = sum(step.num_neighbours > 0 for step in trace.steps)
    if not count:
        return ""
    return f"The replay was not alone: other requests had rows in {count} of its steps."
