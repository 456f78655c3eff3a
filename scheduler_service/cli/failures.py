"""How the command line fails: exit codes, and errors shown as text or JSON.

0   done
1   the server or a child process failed; of explain and replay also: the runs differ
2   wrong usage
3   no server answers, or it is overloaded; trying again later may help
4   the request is not valid; trying again will not help
5   interrupted
78  configuration error
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    # Loading the SDK loads gRPC; a command that fails before it connects need not wait for that.
    from scheduler_service.client import IsobatchError

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INVALID: Final = 4
EXIT_INTERRUPTED: Final = 5
EXIT_CONFIGURATION: Final = 78

# Where the context of a command notes that --json was given.
JSON_KEY: Final = "isobatch.json"


class Failure(click.ClickException):
    """An error to show to the user, with the exit code of the program."""

    # click declares one code a class; the codes here are many and need no classes.
    exit_code: int  # type: ignore[misc]

    def __init__(
        self, message: str, exit_code: int, *, fields: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.fields = fields or {}
        # Asked here, because click shows errors after it has left the command's context.
        context = click.get_current_context(silent=True)
        self._as_json = context is not None and bool(context.meta.get(JSON_KEY))

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error to standard error: one line of JSON under --json, else text."""
        if self._as_json:
            document = {"error": {"message": self.message, **self.fields}}
            click.echo(json.dumps(document), file=file, err=True)
        else:
            click.echo(f"isobatch: {self.message}", file=file, err=True)


def interrupted() -> Failure:
    """Return the failure for Ctrl-C and SIGTERM."""
    return Failure("interrupted", EXIT_INTERRUPTED)


def from_client_error(error: IsobatchError, hint: str = "") -> Failure:
    """Return the failure for an error of the SDK; `hint` says what to do where nobody answers."""
    from scheduler_service import client

    codes: dict[type[IsobatchError], int] = {
        client.UnavailableError: EXIT_UNAVAILABLE,
        client.OverloadedError: EXIT_UNAVAILABLE,
        client.DeadlineError: EXIT_UNAVAILABLE,
        client.InvalidRequestError: EXIT_INVALID,
        client.NotFoundError: EXIT_INVALID,
        client.AlreadyExistsError: EXIT_INVALID,
        client.AccessDeniedError: EXIT_INVALID,
    }
    code = next((codes[kind] for kind in type(error).__mro__ if kind in codes), EXIT_FAILURE)
    lines = [error.message]
    lines += [
        f"  {each.field}: {each.description}"
        for each in error.violations
        if each.description not in error.message
    ]
    if hint and isinstance(error, client.UnavailableError) and not error.code:
        lines.append(hint)
    fields: dict[str, Any] = {
        "code": error.code,
        "reason": error.reason,
        "metadata": dict(error.metadata),
        "violations": [
            {"field": each.field, "description": each.description} for each in error.violations
        ],
        "retry_after_seconds": error.retry_after_seconds,
    }
    return Failure("\n".join(lines), code, fields=fields)
