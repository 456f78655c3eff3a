"""Configs from GGUF metadata and config.json."""

from __future__ import annotations

import math

import pytest

from executor_service.errors import ModelError
from executor_service.models.config import ModelConfig, config_from_gguf
from executor_service.models.config_json import config_from_json, llama3_frequency_factors
from tests.support.tiny_gguf import gguf_metadata
from tests.support.tiny_model import TinyShape, config_json


def _from_gguf(changes: dict[str, object], architecture: str = "llama") -> ModelConfig:
    metadata = gguf_metadata(TinyShape(architecture)) | changes
    values = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(
        values, vocab_size=301, tied_embeddings=True, frequency_factors=None, source="x.gguf"
    )


def test_gguf_and_json_agree_but_for_the_pairing() -> None:
    for architecture in ("llama", "qwen2"):
        shape = TinyShape(architecture)
        gguf = _from_gguf({}, architecture)
        json = config_from_json(config_json(shape), "config.json")
        assert gguf.rope.interleaved == (architecture == "llama")
        assert not json.rope.interleaved
        assert gguf.dimensions() == json.dimensions()
        assert gguf.norm_epsilon == json.norm_epsilon
        assert gguf.rope.base == json.rope.base
        assert gguf.rope.rotary_dim == json.rope.rotary_dim == 16


def test_defaults_of_gguf() -> None:
    config = _from_gguf(
        {
            "llama.attention.key_length": None,
            "llama.attention.value_length": None,
            "llama.attention.head_count_kv": None,
            "llama.rope.freq_base": None,
            "llama.rope.dimension_count": None,
        }
    )
    assert (config.head_dim, config.num_kv_heads) == (16, 6)
    assert (config.rope.base, config.rope.rotary_dim) == (10000.0, 16)
    assert config.dimensions().attention_scale == 1 / math.sqrt(16)


def test_linear_scaling_of_gguf() -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert _from_gguf(dict(scaling)).rope.position_scale == 0.25


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "must be none or linear, got 'yarn': x.gguf"),
        ({"llama.block_count": 0}, "block_count must be an integer of at least 1, got 0"),
        ({"llama.block_count": True}, "block_count must be an integer of at least 1, got True"),
        ({"llama.context_length": None}, "context_length must be an integer of at least 1"),
        ({"llama.attention.value_length": 8}, "must equal the key length 16, got 8"),
        ({"llama.rope.dimension_count": 18}, "must be even and at most 16, got 18"),
        ({"llama.rope.freq_base": math.nan}, "freq_base must be a positive number"),
        ({"general.architecture": None}, "general.architecture must be a string"),
    ],
)
def test_gguf_refusals(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        _from_gguf(changes)


def test_rope_parameters_of_newer_files() -> None:
    values = config_json(TinyShape()) | {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    assert config_from_json(values, "x").rope.base == 500000.0


def test_llama3_factors_keep_short_waves_and_divide_long_ones() -> None:
    factors = llama3_frequency_factors(
        500000.0, 128, factor=8.0, low=1.0, high=4.0, original_context=8192
    )
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert list(factors) == sorted(factors)
    # Blended where 8192 / 4 < wavelength < 8192.
    blended = [index for index, factor in enumerate(factors) if 1.0 < factor < 8.0]
    waves = [2 * math.pi * 500000.0 ** (2 * index / 128) for index in blended]
    assert min(waves) > 2048
    assert max(waves) < 8192
