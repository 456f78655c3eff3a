"""What a running engine says about itself, as plain values."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor_service.engine.backends import BLOCK_SIZE
from executor_service.engine.profile import Profile
from isobatch_kernels.kernel_policy import KernelPolicy

if TYPE_CHECKING:
    from executor_service.engine.profile_store import ProfileKey
    from executor_service.engine.step_request import Limits
    from executor_service.models.checkpoint import TokenizerData
    from executor_service.models.config import ModelConfig
    from executor_service.models.load import LoadedModel

# Contract version 1, fp16 keys and values (docs/numerics.md section 6).
CLASS_FORMAT: Final = "X1.1-a{activation_bits}-kvf16-rope{rope_digest}"
EXACT_POLICY: Final = KernelPolicy()
KV_CLASS: Final = "f16"
MAX_TOP_K: Final = 1024


@dataclass(frozen=True, slots=True)
class Build:
    """The software and the machine."""

    version: str
    backend: str
    device: str
    unit: str
    mlx_version: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """How the kernels compared with the reference at start-up."""

    num_cases: int
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The loaded model."""

    model_id: str
    architecture: str
    numeric_class: str
    weights_digest: str
    num_parameters: int
    source: str
    block_size: int
    num_blocks: int

    @classmethod
    def of(cls, model: LoadedModel, key: ProfileKey) -> ModelDescription:
        """Describe a model as it was built: `key` names its class and its blocks."""
        return cls(
            model_id=model.model_id,
            architecture=model.config.architecture,
            numeric_class=key.numeric_class,
            weights_digest=model.weights_digest,
            num_parameters=model.num_parameters,
            source=model.source,
            block_size=BLOCK_SIZE,
            num_blocks=key.num_blocks,
        )


@dataclass(frozen=True, slots=True)
class DraftCapabilities:
    """The draft model, what one of its requests may hold, and what its passes cost."""

    model: ModelDescription
    limits: Limits
    profile: Profile


@dataclass(frozen=True, slots=True)
class Capabilities:
    """All of it."""

    model: ModelDescription
    tokenizer: TokenizerData
    limits: Limits
    build: Build
    self_test: SelfTestResult
    profile: Profile = field(default_factory=Profile)
    draft: DraftCapabilities | None = None


def numeric_class(
    rope_digest: str,
    activation_bits: int = 12,
    policy: KernelPolicy = EXACT_POLICY,
    detail: str = "",
) -> str:
    """Return the numeric class id: states of two classes never meet.

    `detail` is what else the backend says that a float policy's results depend on.
    """
    if policy.is_exact:
        return CLASS_FORMAT.format(activation_bits=activation_bits, rope_digest=rope_digest)
    return f"{policy.class_prefix()}{detail and f'-{detail}'}-a16f-kvf16-rope{rope_digest}"


def config_digest(config: ModelConfig) -> str:
    """Return SHA-256 over a model's architecture and sizes, in hex."""
    return hashlib.sha256(repr(config).encode()).hexdigest()


def backend_name(unit: str) -> str:
    """Return the backend that a unit belongs to: itself for devices, else the CPU."""
    return unit if unit in ("metal", "cuda", "reference", "mlx") else "cpu"


def package_version(name: str) -> str:
    """Return an installed distribution's version; "unknown" in a bare source tree."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def device_name() -> str:
    """Return the processor's name in words; that of a Mac's chip is also its GPU's."""
    if sys.platform == "darwin":
        try:
            command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
