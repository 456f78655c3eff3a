"""Checkpoints whose tensors do not fit the architecture never become a Program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor_service.errors import ModelError
from executor_service.models.checkpoint import Checkpoint
from executor_service.models.llama import build_llama
from executor_service.models.qwen2 import build_qwen2
from executor_service.models.safetensors_loader import load_directory
from isobatch_kernels.program import Linear, NormQuantize, Program, Quantize
from tests.support.tiny_model import Storage, TinyShape, write_directory


def _checkpoint(tmp_path: Path, shape: TinyShape, storage: Storage) -> Checkpoint:
    write_directory(tmp_path, shape, storage)
    return load_directory(tmp_path)


def _block_sizes(program: Program) -> dict[str, int]:
    return {buffer.name: buffer.activation_block for buffer in program.buffers}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape(), Storage())
    weights = {name: value for name, value in checkpoint.weights.items() if name != "layers.1.up"}
    with pytest.raises(ModelError, match=r"layers\.1\.up must be in the file"):
        build_llama(replace(checkpoint, weights=weights))


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape(), Storage())
    weights = {**checkpoint.weights, "layers.0.k": checkpoint.weights["layers.0.q"]}
    with pytest.raises(
        ModelError, match=r"layers\.0\.k must have shape \(32, 96\), got \(96, 96\)"
    ):
        build_llama(replace(checkpoint, weights=weights))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape(), Storage())
    vectors = {**checkpoint.vectors, "head.bias": np.zeros(301, np.float32)}
    with pytest.raises(ModelError, match=r"must have a place in llama, got head\.bias"):
        build_llama(replace(checkpoint, vectors=vectors))


def test_qwen2_needs_its_biases_and_llama_takes_them(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape("qwen2"), Storage())
    build_llama(checkpoint)
    vectors = {name: value for name, value in checkpoint.vectors.items() if ".k.bias" not in name}
    with pytest.raises(ModelError, match=r"layers\.0\.k\.bias must be in the file"):
        build_qwen2(replace(checkpoint, vectors=vectors))


def test_a_missing_bias_of_llama_is_zeros(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape("qwen2", num_layers=1), Storage())
    vectors = {name: value for name, value in checkpoint.vectors.items() if ".k.bias" not in name}
    program = build_llama(replace(checkpoint, vectors=vectors))
    (qkv,) = (op for op in program.ops if isinstance(op, Linear) and op.out == "qkv")
    assert qkv.bias is not None
    assert qkv.bias.shape == (160,)
    assert (qkv.bias[96:128] == 0).all()
    assert (qkv.bias[:96] == checkpoint.vectors["layers.0.q.bias"]).all()


def test_activation_blocks_follow_the_groups_of_the_consumers(tmp_path: Path) -> None:
    shape = TinyShape(
        hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=4, head_dim=32
    )
    wide = build_llama(_checkpoint(tmp_path / "64", shape, Storage(4, 64)))
    narrow = build_llama(_checkpoint(tmp_path / "32", shape, Storage(4, 32)))
    dense = build_llama(_checkpoint(tmp_path / "0", shape, Storage()))
    quantised = ("attention_in", "o_in", "mlp_in", "down_in", "head_in")
    assert {name: _block_sizes(wide)[f"{name}.64"] for name in quantised} == dict.fromkeys(
        quantised, 64
    )
    assert {name: _block_sizes(narrow)[f"{name}.32"] for name in quantised} == dict.fromkeys(
        quantised, 32
    )
    assert set(_block_sizes(dense).values()) == {0}
    assert not any(isinstance(op, Quantize) for op in dense.ops)


def test_ops_are_named_for_messages(tmp_path: Path) -> None:
    program = build_llama(_checkpoint(tmp_path, TinyShape(), Storage(4)))
    assert len(program.names) == len(program.ops)
    for name, op in zip(program.names, program.ops, strict=True):
        if isinstance(op, Linear):
            assert op.name == name
    assert program.names[0] == "embed"
    assert "layers.1.mlp.down" in program.names


def test_only_the_head_runs_on_wanted_positions(tmp_path: Path) -> None:
    program = build_llama(_checkpoint(tmp_path, TinyShape(), Storage(4)))
    wanted = [
        name
        for name, op in zip(program.names, program.ops, strict=True)
        if isinstance(op, Linear | NormQuantize) and op.wanted_only
    ]
    assert wanted == ["norm", "head"]


def test_dense_and_quantised_parts_of_one_matrix_are_refused(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TinyShape(), Storage(4, overrides=(("k_proj", 0),)))
    with pytest.raises(
        ModelError, match=r"layers\.0\.qkv must be all quantised or all of one dense"
    ):
        build_llama(checkpoint)
