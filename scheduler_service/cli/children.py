"""The commands of the processes that the command line starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_service.cli.failures import EXIT_FAILURE, Failure
from scheduler_service.cli.supervisor import Child, describe_exit


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation.

    -P keeps the current directory out of the search path: a file named like a library, lying where
    the user happens to be, must not break a service.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def executor_child(
    *,
    model: str,
    listen: str,
    metrics_port: int | None,
    kv_memory_mb: int | None = None,
    threads: int | None = None,
    more: Sequence[str] = (),
    name: str = "executor",
) -> Child:
    """Return the executor of a model, at a gRPC address; what is None it decides itself.

    `more` are further flags; `name` stands before its output.
    """
    arguments = ["--model", model, "--listen", listen]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    if kv_memory_mb is not None:
        arguments += ["--kv-memory-mb", str(kv_memory_mb)]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    return Child(name, python_module("executor_service", *arguments, *more))


def scheduler_child(
    *, listen: str, executor: str, metrics_port: int | None, more: Sequence[str] = ()
) -> Child:
    """Return the scheduler in front of the executor at a gRPC address; `more` are further flags."""
    arguments = ["--listen", listen, "--executor", executor]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    argv = python_module("scheduler_service", *arguments, *more)
    return Child("scheduler", argv, hears_failures=True)


def pull(name: str) -> Path:
    """Bring a model to this machine unless it is there, and return its path.

    The child says how it goes on standard error, and the path in its last line of output. Raises
    Failure with the child's exit code.
    """
    done = subprocess.run(
        python_module("executor_service.models.pull", name),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.split()
    if done.returncode != 0 or not lines:
        code = done.returncode if done.returncode > 0 else EXIT_FAILURE
        raise Failure(
            f"[pull] bringing {name} must succeed, got {describe_exit(done.returncode)}", code
        )
    return Path(done.stdout.splitlines()[-1])
