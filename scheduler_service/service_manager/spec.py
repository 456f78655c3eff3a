"""What the system is to keep running."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from scheduler_service import settings

# The executor comes first and goes last: the scheduler needs it for as long as it drains.
NAMES: Final = ("executor", "scheduler")
EXIT_CONFIGURATION: Final = 78

# Above the longest drain of either service (executor 25 s, scheduler 20 s).
STOP_SECONDS: Final = 30
RESTART_SECONDS: Final = 10
OPEN_FILES: Final = 4096
_SEARCH_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

# Runs a program and returns what became of it; output is text.
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class ManagerError(Exception):
    """The system's tool refused; the message holds its words."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One service."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_folder: Path
    # Where a refused configuration is noted.
    record: Path

    @property
    def output_file(self) -> Path:
        """What the service writes outside its own log: little, such as a crash."""
        return self.log_folder / f"{self.name}.output.log"

    @property
    def log_file(self) -> Path:
        """The service's own log, which it rotates."""
        return self.log_folder / f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class Status:
    """A service as the system sees it."""

    name: str
    is_installed: bool
    is_running: bool
    pid: int | None = None
    # Of the last run that ended; None when none has, or when the system does not know.
    exit_code: int | None = None
    # Why the service was not started again, if so.
    refused: str = ""


class Manager(Protocol):
    """The system's supervision of the current user's services."""

    def files(self, specs: Sequence[Spec]) -> dict[Path, bytes]:
        """Return the files that describe the services."""
        ...

    def probe(self) -> None:
        """Raise ManagerError, with a hint on a line of its own, where nothing supervises."""
        ...

    def install(self, specs: Sequence[Spec]) -> None:
        """Write the files, replace what runs, and start the services."""
        ...

    def uninstall(self, names: Sequence[str]) -> str:
        """Stop the services and remove their files; what is not there is no error.

        Returns what could not be done besides, in words; empty when all was.
        """
        ...

    def start(self, names: Sequence[str]) -> None:
        """Start the services."""
        ...

    def stop(self, names: Sequence[str]) -> None:
        """Stop the services; they stay stopped until they are started or the user logs in."""
        ...

    def restart(self, names: Sequence[str]) -> None:
        """Stop the services and start them."""
        ...

    def status(self, names: Sequence[str]) -> list[Status]:
        """Return what the system knows about the services."""
        ...


def run_program(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def make_specs(config: Path, log_folder: Path, environ: Mapping[str, str]) -> list[Spec]:
    """Return both services of this installation, with `config` as their configuration file.

    It need not exist yet. Their logs go to files in `log_folder` unless the file says otherwise.
    Raises SettingsError for a file that cannot be used.
    """
    document = settings.read_file(environ, str(config))[0] if config.exists() else {}
    environment = {"PATH": _SEARCH_PATH, "PYTHONUNBUFFERED": "1"}
    # Sockets must be where this user's programs look for them.
    environment |= {
        name: environ[name]
        for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME")
        if os.path.isabs(environ.get(name, ""))
    }
    specs = []
    for name in NAMES:
        argv = [sys.executable, "-P", "-m", f"{name}_service", "--config", os.path.abspath(config)]
        spec = Spec(
            name,
            tuple(argv),
            # The services never fetch a model by themselves.
            environment | ({"HF_HUB_OFFLINE": "1"} if name == "executor" else {}),
            log_folder,
            log_folder / f"{name}.refused.json",
        )
        table = document.get(name, {})
        if "log_file" not in table:
            argv += ["--log-file", str(spec.log_file)]
        if "log_format" not in table:
            argv += ["--log-format", "json"]
        specs.append(Spec(name, tuple(argv), spec.environment, log_folder, spec.record))
    return specs
