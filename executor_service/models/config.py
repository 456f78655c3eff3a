"""The sizes and constants of one model, read from GGUF metadata or a Hugging Face config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_service.errors import ModelError
from isobatch_kernels.program import Dimensions, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

ARCHITECTURES = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a Program builder needs to know besides the weights."""

    architecture: str  # one of ARCHITECTURES
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope: RopeSpec
    tied_embeddings: bool
    windows: tuple[int, ...]  # (num_layers,) visible keys, 0 for all

    def dimensions(self) -> Dimensions:
        """Return the sizes that backends need."""
        return Dimensions(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            attention_scale=1.0 / math.sqrt(self.head_dim),
        )


class Fields:
    """Typed reads of a metadata mapping; every failure names the source, the key and the value."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self._source = source

    def fail(self, key: str, rule: str) -> ModelError:
        """Return the error for a key that breaks a rule."""
        got = self._values.get(key, "nothing")
        return ModelError(f"[model_config] {key} {rule}, got {got!r:.80}: {self._source}")

    def has(self, key: str) -> bool:
        """Tell whether a key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise self.fail(key, f"must be an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "must be a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self.fail(key, "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "must be a string")
        return value


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return the config; raises ModelError where its sizes do not fit together."""

    def require(rule: str, holds: bool, got: object) -> None:
        if not holds:
            raise ModelError(f"[model_config] {rule}, got {got}: {source}")

    heads = (config.num_heads, config.num_kv_heads)
    require("heads must be a multiple of key/value heads", heads[0] % heads[1] == 0, heads)
    rotary = config.rope.rotary_dim
    require(
        f"rotary dimensions must be even and at most {config.head_dim}",
        rotary % 2 == 0 and rotary <= config.head_dim,
        rotary,
    )
    require(
        "head_dim must be even and at most 512",
        config.head_dim in range(2, 513, 2),
        config.head_dim,
    )
    factors = config.rope.frequency_factors
    if factors is not None:
        require(f"{rotary // 2} frequency factors", len(factors) == rotary // 2, len(factors))
        require(
            "frequency factors must be positive",
            all(math.isfinite(factor) and factor > 0 for factor in factors),
            min(factors),
        )
    return config


def config_from_gguf(
    metadata: Mapping[str, object],
    *,
    vocab_size: int,
    tied_embeddings: bool,
    frequency_factors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """Read GGUF metadata. `vocab_size` is the height of the embedding matrix.

    Llama files store rows of q and k so that rotary pairs are neighbours; Qwen2 files keep halves.
    """
    fields = Fields(metadata, source)
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise fields.fail("general.architecture", f"must be one of {', '.join(ARCHITECTURES)}")

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    num_heads = fields.integer(key("attention.head_count"))
    hidden_size = fields.integer(key("embedding_length"))
    head_dim = fields.integer(key("attention.key_length"), hidden_size // num_heads)
    if fields.integer(key("attention.value_length"), head_dim) != head_dim:
        raise fields.fail(key("attention.value_length"), f"must equal the key length {head_dim}")
    scaling = fields.text(key("rope.scaling.type"), "none")
    if scaling not in ("none", "linear"):
        raise fields.fail(key("rope.scaling.type"), "must be none or linear")
    factor = fields.number(key("rope.scaling.factor"), 1.0) if scaling == "linear" else 1.0
    num_layers = fields.integer(key("block_count"))
    rope = RopeSpec(
        base=fields.number(key("rope.freq_base"), 10000.0),
        rotary_dim=fields.integer(key("rope.dimension_count"), head_dim),
        interleaved=architecture == "llama",
        position_scale=1.0 / factor,
        frequency_factors=frequency_factors,
    )
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(key("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer(key("attention.head_count_kv"), num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=fields.integer(key("context_length")),
        norm_epsilon=fields.number(key("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tied_embeddings=tied_embeddings,
        windows=(0,) * num_layers,
    )
    return checked(config, source)
