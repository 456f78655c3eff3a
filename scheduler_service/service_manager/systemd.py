"""systemd: a user unit for each service, and systemctl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scheduler_service.service_manager.spec import (
    EXIT_CONFIGURATION,
    OPEN_FILES,
    RESTART_SECONDS,
    STOP_SECONDS,
    ManagerError,
    Run,
    Spec,
    Status,
    run_program,
)

_PROPERTIES: Final = ("LoadState", "ActiveState", "MainPID", "ExecMainStatus", "ExecMainCode")
_HINT: Final = (
    "Without it: make serve, or isobatch serve. A user who comes by ssh or su may need: "
    "sudo loginctl enable-linger USER, and a new login."
)


def unit_name(name: str) -> str:
    """Return the name of a service's unit."""
    return f"isobatch-{name}.service"


def quoted(text: str) -> str:
    """Return a word of a command or an assignment as systemd reads it back."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def unit_text(spec: Spec) -> str:
    """Return a service's unit file."""
    # A dollar sign in a command would be expanded.
    command = " ".join(quoted(word).replace("$", "$$") for word in spec.argv)
    environment = "".join(
        f"Environment={quoted(f'{name}={value}')}\n"
        for name, value in sorted(spec.environment.items())
        # systemd sets these itself.
        if name not in ("HOME", "XDG_RUNTIME_DIR")
    )
    after = f"After={unit_name('executor')}\n" if spec.name == "scheduler" else ""
    return f"""\
[Unit]
Description=isobatch {spec.name}
{after}StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
{environment}Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={EXIT_CONFIGURATION}
TimeoutStopSec={STOP_SECONDS}
LimitNOFILE={OPEN_FILES}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


class Systemd:
    """The current user's units."""

    def __init__(self, config_home: Path, run: Run = run_program) -> None:
        """Keep units below `config_home` (~/.config), and drive systemctl through `run`."""
        self._folder = config_home / "systemd" / "user"
        self._run = run

    def files(self, specs: Sequence[Spec]) -> dict[Path, bytes]:
        """Return the unit files."""
        return {self._path(spec.name): unit_text(spec).encode() for spec in specs}

    def probe(self) -> None:
        """Raise ManagerError where no systemd answers this user."""
        try:
            done = self._run(["systemctl", "--user", "show", "--property=Version"])
        except FileNotFoundError:
            words = "no systemctl"
        else:
            if done.returncode == 0:
                return
            words = done.stderr.strip()
        raise ManagerError(
            f"[service] the user's systemd must answer, got {words or 'no answer'}\n{_HINT}"
        )

    def install(self, specs: Sequence[Spec]) -> None:
        """Write the units, replace what runs, and start the services."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.files(specs).items():
            path.write_bytes(content)
        units = [unit_name(spec.name) for spec in specs]
        self._systemctl("daemon-reload")
        self._systemctl("enable", *units)
        self._systemctl("restart", *units)

    def uninstall(self, names: Sequence[str]) -> str:
        """Stop the units and remove their files, these even where no systemd answers."""
        there = [name for name in names if self._path(name).exists()]
        if not there:
            return ""
        try:
            self.probe()
        except ManagerError as error:
            for name in there:
                self._path(name).unlink()
                self._wanted(name).unlink(missing_ok=True)
            words = str(error).partition("\n")[0]
            return f"{words}: the units are removed, but what still runs was not stopped"
        self._systemctl("disable", "--now", *(unit_name(name) for name in reversed(there)))
        for name in there:
            self._path(name).unlink()
        self._systemctl("daemon-reload")
        return ""

    def start(self, names: Sequence[str]) -> None:
        """Start the units."""
        self._systemctl("start", *self._installed(names))

    def stop(self, names: Sequence[str]) -> None:
        """Stop the units."""
        self._systemctl("stop", *reversed(self._installed(names)))

    def restart(self, names: Sequence[str]) -> None:
        """Restart the units."""
        self._systemctl("restart", *self._installed(names))

    def status(self, names: Sequence[str]) -> list[Status]:
        """Return what systemctl shows about the units."""
        found = []
        for name in names:
            done = self._run(
                ["systemctl", "--user", "show", f"--property={','.join(_PROPERTIES)}",
                 unit_name(name)]
            )  # fmt: skip
            lines = (line.partition("=") for line in done.stdout.splitlines())
            values = {key: value for key, _, value in lines}
            pid = int(values.get("MainPID") or 0)
            # 1 is "exited"; before a first end there is no code.
            has_code = values.get("ExecMainCode") == "1"
            code = int(values.get("ExecMainStatus") or 0) if has_code else None
            refused = "configuration refused" if code == EXIT_CONFIGURATION and not pid else ""
            is_running = values.get("ActiveState") in ("active", "deactivating")
            is_there = self._path(name).exists()
            found.append(Status(name, is_there, is_running, pid or None, code, refused))
        return found

    def _path(self, name: str) -> Path:
        return self._folder / unit_name(name)

    def _wanted(self, name: str) -> Path:
        """Where `systemctl enable` links the unit for the next login."""
        return self._folder / "default.target.wants" / unit_name(name)

    def _installed(self, names: Sequence[str]) -> list[str]:
        for name in names:
            if not self._path(name).exists():
                raise ManagerError(
                    f"[service] {name} must be installed first, got no {self._path(name)}"
                )
        return [unit_name(name) for name in names]

    def _systemctl(self, *arguments: str) -> None:
        done = self._run(["systemctl", "--user", *arguments])
        if done.returncode != 0:
            raise ManagerError(f"[service] systemctl {arguments[0]} failed: {done.stderr.strip()}")
