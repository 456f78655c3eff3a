"""`isobatch doctor`: what may keep the services from working, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click

from scheduler_service.cli import children, output
from scheduler_service.cli.failures import EXIT_FAILURE, Failure
from scheduler_service.cli.options import json_option

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"
_MARKS: Final = {OK: "ok     ", WARNING: "WARNING", FAILED: "FAILED "}
_LIBRARIES: Final = ("grpcio", "protobuf", "numpy", "tokenizers", "prometheus-client")
_EXECUTOR_SECONDS: Final = 120
# What the Metal report says with its exit code when there is no device.
_NO_METAL_DEVICE: Final = 3

Check = dict[str, str]


def _check(name: str, state: str, detail: str, advice: str = "") -> Check:
    # Where all is well there is nothing to advise.
    advice = "" if state == OK else advice
    return {"name": name, "state": state, "detail": detail, "advice": advice}


@click.command("doctor")
@click.option("--config", metavar="FILE", help="Configuration file (TOML) instead of the usual.")
@click.option("--metal", "is_metal", is_flag=True, help="Report on a Mac's Metal kernels instead.")
@json_option
def command(config: str | None, is_metal: bool, as_json: bool) -> None:
    """Check the machine, the installation, models, sockets and ports.

    Exit code 1 when something failed; warnings are no failure. Nothing is changed or started.

    --metal compares the GPU's kernels with the contract, measures them, and prints a report in
    Markdown to paste into an issue; it takes a few minutes. Exit code 0 when all of them are
    right, 1 when one is wrong, 3 without a Metal device.
    """
    if is_metal:
        if as_json or config is not None:
            raise click.UsageError("--metal goes with no other option.")
        click.get_current_context().exit(metal())
    arguments = ["--config", config] if config else []
    checks = [*system(), *installation(), *configuration(arguments), *executor(arguments)]
    checks.append(supervision())
    failed = [each["name"] for each in checks if each["state"] == FAILED]
    if as_json:
        output.write_json({"healthy": not failed, "checks": checks})
    else:
        for each in checks:
            click.echo(f"{_MARKS[each['state']]} {each['name']}: {each['detail']}")
            if each["advice"]:
                click.echo(f"        {each['advice']}")
    if failed:
        raise Failure(f"[doctor] every check must pass, got {', '.join(failed)}", EXIT_FAILURE)


def metal() -> int:
    """Let the kernels report on Metal, in a process of their own; return its exit code."""
    command = children.python_module("isobatch_kernels.metal.doctor")
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if code == _NO_METAL_DEVICE and sys.platform != "darwin":
        click.echo(
            "Run this on a Mac with Apple silicon (macOS 14 or newer). Elsewhere the kernels are "
            "proven under an emulation, from the source tree: pytest tests/metal_on_cpu",
            err=True,
        )
    elif code == _NO_METAL_DEVICE:
        click.echo("Run natively, not under Rosetta or in a virtual machine.", err=True)
    # A process that a signal ended has no code of its own.
    return code if code >= 0 else EXIT_FAILURE


def system() -> list[Check]:
    """Look at the system and its Python."""
    import psutil

    machine = platform.machine()
    if sys.platform == "darwin":
        version = platform.mac_ver()[0]
        is_known = machine == "arm64" and int(version.partition(".")[0] or 0) >= 14
        name = f"macOS {version}"
    else:
        is_known = sys.platform == "linux" and machine in ("x86_64", "aarch64")
        name = f"{platform.system()} {platform.release()}"
    memory = psutil.virtual_memory()
    words = f"{name} on {machine}, {os.cpu_count()} cores, {memory.total / 2**30:.1f} GiB"
    advice = "macOS 14 or newer on Apple silicon, or Linux on x86-64 or arm64, is needed."
    python = f"{platform.python_version()} at {sys.executable}"
    is_new = sys.version_info >= (3, 11)
    return [
        _check("system", OK if is_known else FAILED, words, advice),
        _check("python", OK if is_new else FAILED, python, "Python 3.11 or newer is needed."),
    ]


def installation() -> list[Check]:
    """Look at the versions of isobatch and of what it needs."""
    versions, missing = [], []
    for name in ("isobatch", *_LIBRARIES):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if not missing:
        return [_check("versions", OK, ", ".join(versions))]
    # A source tree on the search path has no version of its own, and works.
    state = WARNING if missing == ["isobatch"] else FAILED
    words = f"not installed: {', '.join(missing)}; {', '.join(versions)}"
    return [_check("versions", state, words, "Install isobatch: make setup")]


def configuration(arguments: list[str]) -> list[Check]:
    """Look at the scheduler's settings, and at the sockets and ports that they name."""
    from scheduler_service.config import load, socket_path
    from scheduler_service.errors import ConfigurationError

    try:
        settings = load(arguments, os.environ)
    except ConfigurationError as error:
        advice = "isobatch config show --origin"
        return [_check("scheduler configuration", FAILED, str(error), advice)]
    found = [_check("scheduler configuration", OK, f"listens on {settings.listen}")]
    for name, address in (("scheduler", settings.listen), ("executor", settings.executor)):
        path = socket_path(address)
        if path is not None:
            found += sockets(name, path)
    found.append(port("scheduler", settings.metrics_port))
    return found


def supervision() -> Check:
    """Ask whether `isobatch service` has something to work with; other ways of running need not."""
    from scheduler_service.cli.service import manager
    from scheduler_service.service_manager.spec import ManagerError

    what = "service manager"
    try:
        manager().probe()
    except (ManagerError, Failure) as error:
        words, _, advice = str(error).partition("\n")
        return _check(what, WARNING, words, advice)
    return _check(what, OK, "launchd" if sys.platform == "darwin" else "systemd, for this user")


def sockets(name: str, path: Path) -> list[Check]:
    """Look at a service's socket and the folder around it."""
    what = f"{name} socket"
    try:
        mode = path.parent.stat()
        if stat.S_IMODE(mode.st_mode) & 0o077 or mode.st_uid != os.getuid():
            words = f"{path.parent} has mode {stat.S_IMODE(mode.st_mode):04o}, user {mode.st_uid}"
            return [_check(what, FAILED, words, f"chmod 700 {path.parent}")]
        socket_mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return [_check(what, OK, f"nobody serves on {path}")]
    except OSError as error:
        return [_check(what, FAILED, f"{error.strerror}: {path}")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return [_check(what, OK, f"left over from a process that is gone: {path}")]
    if socket_mode & 0o077:
        return [_check(what, WARNING, f"mode {socket_mode:04o}: {path}", f"chmod 600 {path}")]
    return [_check(what, OK, f"served: {path}")]


def port(name: str, number: int) -> Check:
    """Look at a port of a metrics page: free, or ours."""
    from scheduler_service.cli import scrape

    what = f"{name} metrics port"
    if number == 0:
        return _check(what, OK, "off")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            page = scrape.read(number)
        else:
            return _check(what, OK, f"{number} is free")
    if page is not None and any(each.startswith(f"isobatch_{name}_") for each in page.samples):
        return _check(what, OK, f"{number} is served by the {name}")
    advice = f"Set metrics_port in the table [{name}] to another one."
    return _check(what, FAILED, f"another program has {number}", advice)


def executor(arguments: list[str]) -> list[Check]:
    """Let the executor's side look at itself, in a process of its own."""
    found: list[Check] = []
    try:
        done = subprocess.run(
            children.python_module("executor_service.doctor", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_EXECUTOR_SECONDS,
        )
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        advice = "Reinstall isobatch; then: python -m executor_service.doctor"
        return [_check("executor", FAILED, "its checks did not finish", advice)]
    found += [{key: str(value) for key, value in row.items()} for row in rows]
    settings = _executor_port(arguments)
    if settings is not None:
        found.append(port("executor", settings))
    return found


def _executor_port(arguments: list[str]) -> int | None:
    from scheduler_service.cli import config

    try:
        return config.metrics_port("executor", *arguments)
    except Failure:
        return None  # its own check has said so
