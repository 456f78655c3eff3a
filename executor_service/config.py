"""Configuration of the executor: file, then variables, then flags. Read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor_service import logs, settings, socket_paths
from executor_service.errors import ConfigError
from executor_service.models.registry import DEFAULT_MODEL
from isobatch_kernels.kernel_policy import DEFAULT_THRESHOLD_ROWS, EXACT, POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BACKENDS: Final = ("auto", "cpu", "metal", "cuda", "reference")
UNITS: Final = ("auto", "reference", "scalar", "avx2", "vnni", "amx", "neon")
PROFILES: Final = ("auto", "measure", "off")


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Everything that can be set. Who reads a field stands beside it."""

    # Address to serve on, unix:PATH (server).
    listen: str
    # Alias, .gguf file, model directory or Hugging Face repository id (models.registry).
    model: str = DEFAULT_MODEL
    # Name by which clients ask for the model; empty takes it from `model` (models.registry).
    model_id: str = ""
    # Port of /metrics on 127.0.0.1; 0 for none (server).
    metrics_port: int = 9401
    # Memory of the key/value cache in MiB; 0 sizes it to the model and the machine (engine).
    kv_memory_mb: int = 0
    # Whether sequences share the blocks of equal beginnings (engine).
    prefix_cache: bool = True
    # Disk for cached blocks that leave memory, in MB (10^6 bytes); 0 for none (engine).
    prefix_disk_mb: int = 0
    # Its folder; empty for one in the user's cache folder (engine).
    prefix_disk_dir: str = ""
    # Most token rows of a step (engine).
    max_num_seqs: int = 256
    # Most tokens of a step (engine).
    max_num_batched_tokens: int = 512
    # What computes; auto takes the GPU where there is one and its kernels are right (engine).
    backend: str = "auto"
    # Instruction set of the CPU's kernels; auto takes the best that passes its self-test (engine).
    unit: str = "auto"
    # Bits of the activations' integers: 12, or 8, a faster and coarser numeric class (engine).
    activations: int = 12
    # Compute threads; 0 takes all cores (engine).
    threads: int = 0
    # Kernel policy of linear layers; all but exact are for comparison alone (engine).
    policy: str = EXACT
    # Most rows that policy threshold computes row by row (engine).
    threshold_rows: int = DEFAULT_THRESHOLD_ROWS
    # Where the cost curve comes from: auto measures once and remembers, measure measures at every
    # start, off has none (engine).
    profile: str = "auto"
    # Model that drafts tokens for `model` to verify, named like it; empty for none (engine).
    draft_model: str = ""
    # Longest time that a live session gets to end after SIGTERM (server).
    drain_seconds: float = 25.0
    # Least severe log level (logs).
    log_level: str = "info"
    # console or json (logs).
    log_format: str = "console"
    # File for logs instead of standard error; it is rotated (logs).
    log_file: str = ""
    # Whether gRPC reflection answers (server).
    reflection: bool = True

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        _require(self.model != "", "model", "must not be empty", self.model)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            _require(1 <= value <= 65536, name, "must be in 1..65536", value)
        _require(0 <= self.metrics_port <= 65535, "metrics_port", "must be in 0..65535",
                 self.metrics_port)  # fmt: skip
        _require(self.kv_memory_mb >= 0, "kv_memory_mb", "must be at least 0", self.kv_memory_mb)
        _require(self.activations in (8, 12), "activations", "must be 12 or 8", self.activations)
        _require(self.prefix_disk_mb >= 0, "prefix_disk_mb", "must be at least 0",
                 self.prefix_disk_mb)  # fmt: skip
        _require(self.prefix_cache or not self.prefix_disk_mb, "prefix_disk_mb",
                 "must be 0 without prefix_cache", self.prefix_disk_mb)  # fmt: skip
        _require(0 <= self.threads <= 1024, "threads", "must be in 0..1024", self.threads)
        _require(0 <= self.drain_seconds < float("inf"), "drain_seconds",
                 "must be a finite number of at least 0", self.drain_seconds)  # fmt: skip
        rows = self.threshold_rows
        _require(0 <= rows <= 65536, "threshold_rows", "must be in 0..65536", rows)
        choices = {
            "backend": BACKENDS,
            "policy": POLICIES,
            "unit": UNITS,
            "profile": PROFILES,
            "log_level": logs.LEVELS,
            "log_format": logs.FORMATS,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _require(value in allowed, name, f"must be one of {', '.join(allowed)}", value)
        is_integer = self.policy == EXACT or self.activations == 12
        _require(is_integer, "activations", "must be 12 but for policy exact", self.activations)
        is_cpu = self.backend in ("auto", "cpu") or self.unit == "auto"
        _require(is_cpu, "unit", f"must be auto for backend {self.backend}", self.unit)
        socket_paths.socket_path(self.listen)


def _require(holds: bool, field: str, rule: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"[config] {field} {rule}, got {got!r}")


HELP: Final[Mapping[str, str]] = {
    "listen": "address to serve on: unix:PATH",
    "model": "alias, .gguf file, model directory or Hugging Face repository id",
    "model_id": "name by which clients ask for the model",
    "metrics_port": "port of /metrics on 127.0.0.1; 0 for none",
    "kv_memory_mb": "memory of the key/value cache in MiB; 0 sizes it to model and machine",
    "prefix_cache": "whether sequences share the cached state of equal beginnings: true or false",
    "prefix_disk_mb": "disk for cached state that leaves memory, in MB; 0 for none",
    "prefix_disk_dir": "folder of prefix_disk_mb; empty for one in the user's cache folder",
    "max_num_seqs": "most token rows of a step",
    "max_num_batched_tokens": "most tokens of a step",
    "backend": f"what computes: {', '.join(BACKENDS)}; auto takes a GPU before the CPU",
    "unit": f"instruction set of the CPU's kernels: {', '.join(UNITS)}",
    "activations": "bits of the activations' integers: 12, or 8 (faster, coarser, CPU only)",
    "threads": "compute threads; 0 for all cores",
    "policy": f"kernels of linear layers: {', '.join(POLICIES)}; all but exact let another "
    "request's rows change results or are slow, and are for comparison alone",
    "threshold_rows": "most rows that policy threshold computes row by row",
    "profile": "the measured cost of steps: auto (once, then remembered), measure (now) or off",
    "draft_model": "model that drafts tokens for the model to verify: alias (smollm2-draft), "
    ".gguf file or directory; empty for none",
    "drain_seconds": "longest time that a live session gets to end after SIGTERM",
    "log_level": f"least severe log level: {', '.join(logs.LEVELS)}",
    "log_format": f"format of logs: {', '.join(logs.FORMATS)}",
    "log_file": "file for logs instead of standard error; it is rotated",
    "reflection": "whether gRPC reflection answers: true or false",
}


_SOURCE: Final = settings.Source(
    section="executor",
    prefix="ISOBATCH_EXECUTOR_",
    program="isobatch-executor",
    description="Holds a model and computes steps for a scheduler.",
    help=HELP,
    flags={},
)


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> settings.Loaded:
    """Return every setting with its origin; raises ConfigError. `--help` prints and exits."""
    try:
        loaded = settings.load(ExecutorConfig, _SOURCE, arguments, environ)
    except settings.SettingsError as error:
        raise ConfigError(str(error)) from error
    listen = settings.Setting(socket_paths.default_address(environ), "default")
    return settings.Loaded({"listen": listen, **loaded.settings}, loaded.is_shown)


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> ExecutorConfig:
    """Return the checked configuration; raises ConfigError. `--help` prints and exits."""
    return ExecutorConfig(**read(arguments, environ).values)
