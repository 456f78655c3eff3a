"""Configuration of the scheduler: flags, then variables, then defaults. Read once."""

import argparse
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from scheduler_service import logs, runtime_paths
from scheduler_service.errors import ConfigurationError

_PREFIX = "ISOBATCH_SCHEDULER_"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything that can be set. Who reads a field stands beside it."""

    # Address to serve on: `unix:PATH` or a loopback `host:port` (server).
    listen: str
    # Address of the executor (executor_client).
    executor: str
    # Port of /metrics on 127.0.0.1; 0 for none (server).
    metrics_port: int = 9400
    # Most requests that hold cache at once (core).
    max_num_seqs: int = 256
    # Most tokens of one step (core).
    max_num_batched_tokens: int = 2048
    # Most tokens of one request's prefill in one step (core).
    max_prefill_chunk: int = 512
    # Most waiting requests (core).
    max_num_waiting: int = 1024
    # Longest time without an executor before live requests are given up (step_loop).
    recovery_deadline_seconds: float = 60.0
    # Longest wait for an answer of the executor before it counts as lost (executor_client).
    step_timeout_seconds: float = 60.0
    # Longest time that live requests get to end after SIGTERM (server).
    drain_seconds: float = 20.0
    # Least severe log level (logs).
    log_level: str = "info"
    # json or console (logs).
    log_format: str = "console"
    # Whether gRPC reflection answers (server).
    reflection: bool = True

    def __post_init__(self) -> None:
        """Check every field; raises ConfigurationError."""
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_chunk",
            "max_num_waiting",
        ):
            value = getattr(self, name)
            _require(value >= 1, name, "must be at least 1", value)
        _require(0 <= self.metrics_port <= 65535, "metrics_port", "must be in 0..65535",
                 self.metrics_port)  # fmt: skip
        for name in ("recovery_deadline_seconds", "drain_seconds"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), name, "must be a finite number at least 0", value)
        _require(0 < self.step_timeout_seconds < float("inf"), "step_timeout_seconds",
                 "must be a finite number above 0", self.step_timeout_seconds)  # fmt: skip
        _require(self.log_level in logs.LEVELS, "log_level",
                 f"must be one of {', '.join(logs.LEVELS)}", self.log_level)  # fmt: skip
        _require(self.log_format in logs.FORMATS, "log_format",
                 f"must be one of {', '.join(logs.FORMATS)}", self.log_format)  # fmt: skip
        check_address("listen", self.listen)
        check_address("executor", self.executor)


def _require(holds: bool, field: str, rule: str, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"[config] {field} {rule}, got {got!r}")


def socket_path(address: str) -> Path | None:
    """Return the path of a `unix:` address, else None."""
    prefix = runtime_paths.UNIX_PREFIX
    return Path(address.removeprefix(prefix)) if address.startswith(prefix) else None


def check_address(field: str, address: str) -> None:
    """Raise ConfigurationError unless `address` is a short Unix socket or loopback TCP.

    Without TLS, which is not offered, nothing may leave the machine.
    """
    path = socket_path(address)
    if path is not None:
        _require(path.is_absolute(), field, "must name an absolute socket path", address)
        try:
            runtime_paths.check_socket_path(path)
        except runtime_paths.RuntimePathError as error:
            raise ConfigurationError(f"[config] {field}: {error}") from error
        return
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    _require(port.isdigit() and int(port) <= 65535, field,
             "must be unix:PATH or HOST:PORT", address)  # fmt: skip
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    _require(is_loopback, field, "must be a loopback address unless TLS is in use", address)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"[config] {message}")


_HELP: Mapping[str, str] = {
    "listen": "address to serve on: unix:PATH or a loopback HOST:PORT",
    "executor": "address of the executor: unix:PATH or a loopback HOST:PORT",
    "metrics_port": "port of /metrics on 127.0.0.1; 0 for none",
    "max_num_seqs": "most requests that hold cache at once",
    "max_num_batched_tokens": "most tokens of one step",
    "max_prefill_chunk": "most tokens of one request's prefill in one step",
    "max_num_waiting": "most waiting requests",
    "recovery_deadline_seconds": "longest time without an executor before requests are given up",
    "step_timeout_seconds": "longest wait for an answer of the executor before it counts as lost",
    "drain_seconds": "longest time that live requests get to end after SIGTERM",
    "log_level": f"least severe log level: {', '.join(logs.LEVELS)}",
    "log_format": f"format of logs: {', '.join(logs.FORMATS)}",
    "reflection": "whether gRPC reflection answers: true or false",
}
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "recovery_deadline_seconds": ("--recovery-deadline", "--recovery-deadline-seconds"),
    "step_timeout_seconds": ("--step-timeout", "--step-timeout-seconds"),
}


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")


_CONVERT: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _parse_bool,
}


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> SchedulerConfig:
    """Return the configuration from flags and `ISOBATCH_SCHEDULER_<FIELD>` variables.

    Raises ConfigurationError; `--help` prints and exits.
    """
    parser = _Parser(
        prog="isobatch-scheduler",
        description="Serves clients and drives an executor. A flag --some-name may be given "
        f"as the variable {_PREFIX}SOME_NAME.",
        allow_abbrev=False,
    )
    for each in fields(SchedulerConfig):
        flags = _FLAGS.get(each.name, (f"--{each.name.replace('_', '-')}",))
        text = environ.get(_PREFIX + each.name.upper())
        convert = _CONVERT[str(getattr(each.type, "__name__", each.type))]
        parser.add_argument(
            *flags, dest=each.name, type=convert, help=_HELP[each.name],
            metavar=each.name.rpartition("_")[2].upper(),
            # argparse converts a default that is a string, so errors name the flag.
            default=text if text is not None else argparse.SUPPRESS,
        )  # fmt: skip
    values = vars(parser.parse_args(list(arguments)))
    try:
        values.setdefault("listen", runtime_paths.default_scheduler_address(environ))
        values.setdefault("executor", runtime_paths.default_executor_address(environ))
    except runtime_paths.RuntimePathError as error:
        raise ConfigurationError(f"[config] {error}") from error
    return SchedulerConfig(**values)
