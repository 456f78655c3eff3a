"""launchd: a property list for each service, and launchctl.

launchd knows no order between jobs and no exit code that must not be restarted: it restarts
whatever did not exit with 0. So `runner` stands in between, which notes a refused configuration
and then exits with 0.
"""

from __future__ import annotations

import os
import plistlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from scheduler_service.service_manager import runner
from scheduler_service.service_manager.spec import (
    OPEN_FILES,
    RESTART_SECONDS,
    STOP_SECONDS,
    ManagerError,
    Run,
    Spec,
    Status,
    run_program,
)

LABEL_PREFIX: Final = "org.isobatch"
_UMASK: Final = 0o077
_POLL_SECONDS: Final = 0.2
_SPARE_SECONDS: Final = 5
_LAUNCHCTL: Final = "/bin/launchctl"


def label(name: str) -> str:
    """Return the name of a service's job."""
    return f"{LABEL_PREFIX}.{name}"


def property_list(spec: Spec) -> dict[str, Any]:
    """Return the keys and values of a service's job."""
    return {
        "Label": label(spec.name),
        # No shell, and nothing is expanded: absolute paths only.
        "ProgramArguments": [
            sys.executable, "-P", "-m", runner.__name__, "--record", str(spec.record), "--",
            *spec.argv,
        ],
        "EnvironmentVariables": dict(spec.environment),
        "RunAtLoad": True,
        # A crash is mended; a stop, and a configuration that the service refused, are not.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        # Without it launchd throttles processor, disk and GPU as of a background job.
        "ProcessType": "Interactive",
        "ExitTimeOut": STOP_SECONDS,
        "StandardOutPath": str(spec.output_file),
        "StandardErrorPath": str(spec.output_file),
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "Umask": _UMASK,
        "WorkingDirectory": "/",
    }  # fmt: skip


class Launchd:
    """The current user's jobs."""

    def __init__(
        self,
        home: Path,
        run: Run = run_program,
        uid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep property lists below `home`, and drive launchctl through `run`."""
        self._sleep = sleep
        self._folder = home / "Library" / "LaunchAgents"
        self._run = run
        self._uid = os.getuid() if uid is None else uid

    def files(self, specs: Sequence[Spec]) -> dict[Path, bytes]:
        """Return the property lists."""
        return {self._path(spec.name): plistlib.dumps(property_list(spec)) for spec in specs}

    def probe(self) -> None:
        """Every user of a Mac has a launchd: there is nothing to find out."""

    def install(self, specs: Sequence[Spec]) -> None:
        """Write the property lists, replace what runs, and start the services."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for spec in specs:
            spec.log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            spec.record.unlink(missing_ok=True)
        for path, content in self.files(specs).items():
            path.write_bytes(content)
        for spec in specs:
            self._bootout(spec.name)
            self._bootstrap(spec.name)

    def uninstall(self, names: Sequence[str]) -> str:
        """End the jobs and remove their files."""
        for name in reversed(names):
            self._bootout(name)
            self._path(name).unlink(missing_ok=True)
        return ""

    def start(self, names: Sequence[str]) -> None:
        """Load jobs that are not loaded, and start those that do not run."""
        for name in names:
            if not self._print(name):
                self._bootstrap(name)
            self._launchctl("kickstart", self._target(name))

    def stop(self, names: Sequence[str]) -> None:
        """Unload the jobs: one that is loaded might be started again."""
        for name in reversed(names):
            self._bootout(name)

    def restart(self, names: Sequence[str]) -> None:
        """End the jobs' processes and start them."""
        for name in names:
            if not self._print(name):
                self._bootstrap(name)
            self._launchctl("kickstart", "-k", self._target(name))

    def status(self, names: Sequence[str]) -> list[Status]:
        """Return what launchctl prints about the jobs."""
        found = []
        for name in names:
            text, path = self._print(name), self._path(name)
            pid, code = _number(text, "pid"), _number(text, "last exit code")
            refused = ""
            if path.exists():
                arguments = plistlib.loads(path.read_bytes())["ProgramArguments"]
                refused = runner.read_record(Path(arguments[arguments.index("--record") + 1]))
            is_running = "state = running" in text
            found.append(Status(name, path.exists(), is_running, pid, code, refused))
        return found

    def _path(self, name: str) -> Path:
        return self._folder / f"{label(name)}.plist"

    def _domain(self) -> str:
        # Without a session at the screen, as over ssh, there is only the user's own domain.
        gui = f"gui/{self._uid}"
        is_there = self._run([_LAUNCHCTL, "print", gui]).returncode == 0
        return gui if is_there else f"user/{self._uid}"

    def _target(self, name: str) -> str:
        return f"{self._domain()}/{label(name)}"

    def _print(self, name: str) -> str:
        done = self._run([_LAUNCHCTL, "print", self._target(name)])
        return done.stdout if done.returncode == 0 else ""

    def _bootstrap(self, name: str) -> None:
        path = self._path(name)
        if not path.exists():
            raise ManagerError(f"[service] {name} must be installed first, got no {path}")
        done = self._run([_LAUNCHCTL, "bootstrap", self._domain(), str(path)])
        if done.returncode != 0 and not self._print(name):
            raise ManagerError(f"[service] launchctl bootstrap failed: {done.stderr.strip()}")

    def _bootout(self, name: str) -> None:
        done = self._run([_LAUNCHCTL, "bootout", self._target(name)])
        # It may return while the service still finishes what runs; until then there is no new one.
        for _ in range(round((STOP_SECONDS + _SPARE_SECONDS) / _POLL_SECONDS)):
            if not self._print(name):
                return
            self._sleep(_POLL_SECONDS)
        raise ManagerError(f"[service] launchctl bootout failed: {done.stderr.strip()}")

    def _launchctl(self, *arguments: str) -> None:
        done = self._run([_LAUNCHCTL, *arguments])
        if done.returncode != 0:
            words = done.stderr.strip()
            raise ManagerError(f"[service] launchctl {arguments[0]} failed: {words}")


def _number(text: str, key: str) -> int | None:
    found = re.search(rf"^\s*{key} = (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None
