"""Configuration of the scheduler: file, then variables, then flags. Read once."""

import ipaddress
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler_service import logs, runtime_paths, settings
from scheduler_service.errors import ConfigurationError
from scheduler_service.speculation import MAX_DRAFT_TOKENS, ProposerKind

SPECULATION_OFF = "off"
LOOKAHEAD_AUTO = "auto"
LOOKAHEAD_KINDS = (LOOKAHEAD_AUTO, "off")
SPECULATION_AUTO = "auto"
SPECULATION_KINDS = (
    SPECULATION_OFF, *(kind.value for kind in ProposerKind), SPECULATION_AUTO
)  # fmt: skip


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
    # Most milliseconds of a step while requests decode; 0 derives it from the executor's cost
    # curve (core).
    max_step_ms: float = 0.0
    # Most waiting requests (core).
    max_num_waiting: int = 1024
    # Most tokens of waiting requests together (core).
    max_waiting_tokens: int = 1_000_000
    # After so long a waiting request rises by one priority class (core).
    aging_seconds: float = 30.0
    # Tokens that a client may be behind before its request is paused (slow_readers).
    max_undelivered_tokens: int = 512
    # Longest time that a request is paused because its client does not read (slow_readers).
    slow_reader_seconds: float = 60.0
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
    # File for logs instead of standard error; it is rotated (logs).
    log_file: str = ""
    # Whether the log holds the text of prompts (servicer).
    log_prompts: bool = False
    # Who drafts tokens: off, lookup, draft (the executor's draft model) or auto, which is both
    # (speculation).
    speculation: str = "off"
    # Most drafted tokens of one row (speculation).
    max_draft_tokens: int = 8
    # Always so many drafted tokens, whatever they gain; 0 lets gain and cost decide (speculation).
    fixed_draft_tokens: int = 0
    # Whether a step may be sent before the answer to the last one: auto or off (step_loop).
    lookahead: str = "auto"
    # Whether gRPC reflection answers (server).
    reflection: bool = True
    # Folder for traces of requests, as an absolute path; empty keeps none (server).
    trace_dir: str = ""
    # Most MB (10^6 bytes) of traces there, the oldest of which go first; 0 for no bound (server).
    trace_dir_mb: int = 1000
    # Whether latencies on the metrics page name a request each, in OpenMetrics (metrics).
    metrics_exemplars: bool = False
    # Address of an OpenTelemetry collector, http(s)://HOST:PORT; empty for none (tracing).
    otlp_endpoint: str = ""
    # Each how many steps one becomes a span; 0 for none (tracing).
    otlp_step_every: int = 0

    def __post_init__(self) -> None:
        """Check every field; raises ConfigurationError."""
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_chunk",
            "max_num_waiting",
            "max_waiting_tokens",
            "max_undelivered_tokens",
        ):
            value = getattr(self, name)
            _require(value >= 1, name, "must be at least 1", value)
        _require(0 <= self.metrics_port <= 65535, "metrics_port", "must be in 0..65535",
                 self.metrics_port)  # fmt: skip
        # Its inverse must be a number, and below that it would mean nothing.
        _require(0.001 <= self.aging_seconds < float("inf"), "aging_seconds",
                 "must be a finite number at least 0.001", self.aging_seconds)  # fmt: skip
        for name in ("slow_reader_seconds", "step_timeout_seconds"):
            value = getattr(self, name)
            _require(0 < value < float("inf"), name, "must be a finite number above 0", value)
        for name in ("recovery_deadline_seconds", "drain_seconds", "max_step_ms"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), name, "must be a finite number at least 0", value)
        _require(self.speculation in SPECULATION_KINDS, "speculation",
                 f"must be one of {', '.join(SPECULATION_KINDS)}", self.speculation)  # fmt: skip
        _require(1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS, "max_draft_tokens",
                 f"must be in 1..{MAX_DRAFT_TOKENS}", self.max_draft_tokens)  # fmt: skip
        _require(0 <= self.fixed_draft_tokens <= MAX_DRAFT_TOKENS, "fixed_draft_tokens",
                 f"must be in 0..{MAX_DRAFT_TOKENS}", self.fixed_draft_tokens)  # fmt: skip
        _require(self.lookahead in LOOKAHEAD_KINDS, "lookahead",
                 f"must be one of {', '.join(LOOKAHEAD_KINDS)}", self.lookahead)  # fmt: skip
        _require(self.log_level in logs.LEVELS, "log_level",
                 f"must be one of {', '.join(logs.LEVELS)}", self.log_level)  # fmt: skip
        _require(self.log_format in logs.FORMATS, "log_format",
                 f"must be one of {', '.join(logs.FORMATS)}", self.log_format)  # fmt: skip
        for name in ("otlp_step_every", "trace_dir_mb"):
            value = getattr(self, name)
            _require(value >= 0, name, "must be at least 0", value)
        _require(_is_endpoint(self.otlp_endpoint), "otlp_endpoint",
                 "must be http://HOST:PORT, https://HOST:PORT or empty",
                 self.otlp_endpoint)  # fmt: skip
        _require(not self.trace_dir or Path(self.trace_dir).is_absolute(), "trace_dir",
                 "must be an absolute path or empty", self.trace_dir)  # fmt: skip
        check_address("listen", self.listen)
        check_address("executor", self.executor)


def _require(holds: bool, field: str, rule: str, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"[config] {field} {rule}, got {got!r}")


def _is_endpoint(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:  # a host or a port that is none
        return False
    return is_whole or not address


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
            raise ConfigurationError(f"[config] {field}: {error.rule}") from error
        return
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    _require(port.isascii() and port.isdigit() and int(port) <= 65535, field,
             "must be unix:PATH or HOST:PORT", address)  # fmt: skip
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    _require(is_loopback, field, "must be a loopback address unless TLS is in use", address)


_HELP: Mapping[str, str] = {
    "listen": "address to serve on: unix:PATH or a loopback HOST:PORT",
    "executor": "address of the executor: unix:PATH or a loopback HOST:PORT",
    "metrics_port": "port of /metrics on 127.0.0.1; 0 for none",
    "max_num_seqs": "most requests that hold cache at once",
    "max_num_batched_tokens": "most tokens of one step",
    "max_prefill_chunk": "most tokens of one request's prefill in one step",
    "max_step_ms": "most milliseconds of a step while requests decode; 0 derives it from the "
    "executor's cost curve",
    "max_num_waiting": "most waiting requests",
    "max_waiting_tokens": "most tokens of waiting requests together",
    "aging_seconds": "after so long a waiting request rises by one priority class",
    "max_undelivered_tokens": "tokens that a client may be behind before its request is paused",
    "slow_reader_seconds": "longest pause because a client does not read, before it gets an error",
    "recovery_deadline_seconds": "longest time without an executor before requests are given up",
    "step_timeout_seconds": "longest wait for an answer of the executor before it counts as lost",
    "drain_seconds": "longest time that live requests get to end after SIGTERM",
    "log_level": f"least severe log level: {', '.join(logs.LEVELS)}",
    "log_format": f"format of logs: {', '.join(logs.FORMATS)}",
    "log_file": "file for logs instead of standard error; it is rotated",
    "log_prompts": "whether the log holds the text of prompts: true or false",
    "speculation": f"who drafts tokens: {', '.join(SPECULATION_KINDS)}; changes no token",
    "max_draft_tokens": "most drafted tokens that one step verifies for a request",
    "fixed_draft_tokens": "always so many drafted tokens, for comparisons; 0: their gain decides",
    "lookahead": "whether a step is sent before the answer to the last one: "
    f"{', '.join(LOOKAHEAD_KINDS)}; changes no token",
    "reflection": "whether gRPC reflection answers: true or false",
    "trace_dir": "folder for traces of requests that ask for one; empty keeps none",
    "trace_dir_mb": "most MB of traces in trace_dir, the oldest go first; 0 for no bound",
    "metrics_exemplars": "whether latencies in OpenMetrics name a request each: true or false",
    "otlp_endpoint": "address of an OpenTelemetry collector: http(s)://HOST:PORT",
    "otlp_step_every": "each how many steps one becomes a span; 0 for none",
}
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "recovery_deadline_seconds": ("--recovery-deadline", "--recovery-deadline-seconds"),
    "step_timeout_seconds": ("--step-timeout", "--step-timeout-seconds"),
}


_SOURCE = settings.Source(
    section="scheduler",
    prefix="ISOBATCH_SCHEDULER_",
    program="isobatch-scheduler",
    description="Serves clients and drives an executor.",
    help=_HELP,
    flags=_FLAGS,
)


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> settings.Loaded:
    """Return every setting with its origin; raises ConfigurationError. `--help` exits."""
    try:
        loaded = settings.load(SchedulerConfig, _SOURCE, arguments, environ)
        defaults = {
            "listen": runtime_paths.default_scheduler_address,
            "executor": runtime_paths.default_executor_address,
        }
        missing = {
            name: settings.Setting(address(environ), "default")
            for name, address in defaults.items()
            if name not in loaded.settings
        }
    except settings.SettingsError as error:
        raise ConfigurationError(str(error)) from error
    except runtime_paths.RuntimePathError as error:
        raise ConfigurationError(f"[config] {error.rule}") from error
    return settings.Loaded({**missing, **loaded.settings}, loaded.is_shown)


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> SchedulerConfig:
    """Return the checked configuration; raises ConfigurationError. `--help` prints and exits."""
    return SchedulerConfig(**read(arguments, environ).values)
