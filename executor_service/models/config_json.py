"""Reads a Hugging Face config.json of the Llama and Qwen2 families."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from executor_service.models.config import ARCHITECTURES, Fields, ModelConfig, checked
from isobatch_kernels.program import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


def config_from_json(values: Mapping[str, object], source: str) -> ModelConfig:
    """Return the model's config; raises ModelError for what this executor does not compute."""
    fields = Fields(values, source)
    architecture = fields.text("model_type")
    if architecture not in ARCHITECTURES:
        raise fields.fail("model_type", f"must be one of {', '.join(ARCHITECTURES)}")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.fail("hidden_act", "must be silu")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings", 2048),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(values, fields, head_dim, source),
        # transformers' own defaults: Llama and Qwen2 untied unless the file says so.
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, num_layers),
    )
    return checked(config, source)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Qwen2: layers from max_window_layers on see `sliding_window` keys, their own included."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return (0,) * num_layers
    window = fields.integer("sliding_window")
    full = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer >= full else 0 for layer in range(num_layers))


def _rope(values: Mapping[str, object], fields: Fields, head_dim: int, source: str) -> RopeSpec:
    """Read the rotary embedding; newer files keep everything in `rope_parameters`."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    raw = values.get(key)
    if raw is not None and not isinstance(raw, dict):
        raise fields.fail(key, "must be an object")
    scaling = Fields(raw or {}, source)
    default_base = fields.number("rope_theta", 10000.0)
    base = scaling.number("rope_theta", default_base)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    position_scale = 1.0
    factors: tuple[float, ...] | None = None
    if kind == "linear":
        position_scale = 1.0 / scaling.number("factor")
    elif kind == "llama3":
        factors = llama3_frequency_factors(
            base,
            head_dim,
            factor=scaling.number("factor"),
            low=scaling.number("low_freq_factor"),
            high=scaling.number("high_freq_factor"),
            original_context=scaling.integer("original_max_position_embeddings"),
        )
    elif kind != "default":
        raise fields.fail(key, "must be of type default, linear or llama3")
    return RopeSpec(
        base=base,
        rotary_dim=head_dim,
        interleaved=False,
        position_scale=position_scale,
        frequency_factors=factors,
    )


def llama3_frequency_factors(
    base: float, head_dim: int, *, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Return the divisors of the inverse frequencies that Llama 3.1 introduced.

    Short wavelengths keep their frequency, long ones are divided by `factor`, and those between
    `original_context / high` and `original_context / low` are blended.
    """
    factors = []
    for index in range(head_dim // 2):
        frequency = base ** (-2.0 * index / head_dim)
        wavelength = 2.0 * math.pi / frequency
        if wavelength < original_context / high:
            factors.append(1.0)
        elif wavelength > original_context / low:
            factors.append(factor)
        else:
            blend = (original_context / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(factors)
