"""How a command reaches its server: the user's, or one of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from scheduler_service.cli.failures import from_client_error
from scheduler_service.cli.options import EMBEDDED_MODEL
from scheduler_service.runtime_paths import UNIX_PREFIX, default_scheduler_address

if TYPE_CHECKING:
    from scheduler_service.client import Client

START_HINT: Final = "Start a server with `isobatch serve`."
_PRIVATE_HINT: Final = "Start a server with `isobatch serve`, or add --serve for one of its own."
_CONNECT_SECONDS: Final = 5.0
# A path, or anything that ends in a port; what comes of a URL for the web is no connection.
_ADDRESS: Final = re.compile(r"unix:.+|(?!https?:)\S+:\d{1,5}")


@contextmanager
def connected(address: str | None, hint: str = START_HINT) -> Iterator[Client]:
    """Give a client of the server at `address`; errors of the SDK become the program's.

    `hint` says what to do where no server answers.
    """
    from scheduler_service.client import Client, IsobatchError, UnavailableError

    address = address or default_scheduler_address()
    if not _ADDRESS.fullmatch(address):
        raise click.UsageError(f"--address must be unix:PATH or HOST:PORT, got {address}")
    try:
        path = Path(address.removeprefix(UNIX_PREFIX))
        if address.startswith(UNIX_PREFIX) and not path.exists():
            # Waiting is for servers that start; without a socket nobody does.
            raise UnavailableError(f"[connect] a scheduler must listen, got no socket {path}")
        with Client(address, connect_timeout=_CONNECT_SECONDS) as client:
            yield client
    except IsobatchError as error:
        raise from_client_error(error, hint) from None


@contextmanager
def connected_or_private(
    address: str | None,
    *,
    serve_privately: bool,
    model: str,
    threads: int | None,
    kv_memory_mb: int | None,
) -> Iterator[tuple[Client, str]]:
    """Give a client and the model to ask for: of the server, or of one started here."""
    if not serve_privately:
        if threads is not None or kv_memory_mb is not None:
            raise click.UsageError("--threads and --kv-memory-mb need --serve")
        with connected(address, _PRIVATE_HINT) as client:
            yield client, model
        return
    context = click.get_current_context()
    if context.get_parameter_source("address") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--serve starts a server of its own: leave --address out")
    from scheduler_service.cli.private_pair import private_pair

    with (
        private_pair(
            model or EMBEDDED_MODEL, threads=threads, kv_memory_mb=kv_memory_mb
        ) as own_address,
        connected(own_address) as client,
    ):
        # The only model there is the default one; a path would not be its name.
        yield client, ""
