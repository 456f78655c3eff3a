"""Damaged and foreign safetensors directories are refused with file and reason."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.errors import ModelError
from executor_service.models.safetensors_header import read_header
from executor_service.models.safetensors_loader import load_directory
from isobatch_kernels.program import DenseWeight, QuantizedWeight
from tests.support.tiny_model import Storage, TinyShape, write_directory

SHAPE = TinyShape(num_layers=1, vocab_size=64)


def _file(header: object, body: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def _entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _refused(data: bytes, match: str) -> None:
    with pytest.raises(ModelError, match=match) as raised:
        read_header(memoryview(data), "some.safetensors")
    assert str(raised.value).endswith("some.safetensors")


def test_reads_tensors() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": _entry(0, 24, [2, 3])}
    tensors = read_header(memoryview(_file(header, bytes(24))), "x")
    assert tensors["a"].shape == (2, 3)
    assert tensors["a"].offset + 24 == len(_file(header, bytes(24)))


@pytest.mark.parametrize(
    ("header", "body", "match"),
    [
        ([], b"", "must be an object"),
        ({"a": 1}, b"", "entry of a must be an object"),
        ({"a": _entry(0, 8, [1], "F64")}, bytes(8), "a must be of type F32, F16, BF16, U32"),
        ({"a": _entry(0, 4, [-1])}, bytes(4), "shape of a must be a list of sizes"),
        ({"a": _entry(0, 5, [1])}, bytes(5), r"a of shape \[1\] must have 4 bytes"),
        ({"a": _entry(4, 8, [1])}, bytes(8), "without gaps"),
        ({"a": _entry(0, 4, [1]), "b": _entry(0, 4, [1])}, bytes(4), "without gaps"),
        ({"a": _entry(0, 4, [1])}, bytes(3), "complete download"),
        ({"a": _entry(0, 4, [1])}, bytes(5), "must end where the file ends"),
    ],
)
def test_refuses_headers_that_cannot_be(header: object, body: bytes, match: str) -> None:
    _refused(_file(header, body), match)


def test_refuses_what_is_not_a_header() -> None:
    _refused(b"short", "must hold a header")
    _refused((1 << 40).to_bytes(8, "little") + bytes(50), "header must fit in the file")
    _refused(_file({}, b"")[:8] + b"{]", "header must be JSON")


@given(data=st.data())
def test_changed_bytes_are_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(_file({"a": _entry(0, 24, [2, 3])}, bytes(24)))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = read_header(memoryview(bytes(whole)), "x")
    except ModelError:
        return
    for info in tensors.values():
        assert info.offset + info.num_bytes <= len(whole)


def _edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def _edit_tensors(path: Path, changes: dict[str, mx.array | None]) -> None:
    file = str(path / "model.safetensors")
    tensors = mx.load(file)
    assert isinstance(tensors, dict)
    merged = {**tensors, **changes}
    mx.save_safetensors(file, {key: value for key, value in merged.items() if value is not None})


def test_loads_quantised_and_dense_weights(tmp_path: Path) -> None:
    write_directory(tmp_path, SHAPE, Storage(4, 32, overrides=(("o_proj", 0), ("v_proj", 6))))
    checkpoint = load_directory(tmp_path)
    q, v, o = (checkpoint.weights[f"layers.0.{name}"] for name in "qvo")
    assert isinstance(q, QuantizedWeight)
    assert isinstance(v, QuantizedWeight)
    assert isinstance(o, DenseWeight)
    assert (q.bits, v.bits, q.group_size) == (4, 6, 32)
    matrices = 96 * 96 * 2 + 2 * 96 * 32 + 3 * 96 * 160 + 64 * 96
    assert checkpoint.num_parameters == matrices + 3 * 96


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    write_directory(tmp_path / "one", SHAPE, Storage(4))
    write_directory(tmp_path / "two", SHAPE, Storage(4))
    two = tmp_path / "two"
    tensors = mx.load(str(two / "model.safetensors"))
    assert isinstance(tensors, dict)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index}.safetensors"
        mx.save_safetensors(str(two / file), {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (two / "model.safetensors").unlink()
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, other = load_directory(tmp_path / "one"), load_directory(two)
    assert one.digest == other.digest
    assert one.weights.keys() == other.weights.keys()
    (two / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"every file of the index must be there.*model-1"):
        load_directory(two)


def test_an_index_may_not_lead_elsewhere(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", SHAPE, Storage())
    index = tmp_path / "m" / "model.safetensors.index.json"
    for name in ("../other.safetensors", "x" * 5000):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="must name files here"):
            load_directory(tmp_path / "m")


def test_a_head_beside_tied_embeddings_is_left_out(tmp_path: Path) -> None:
    write_directory(tmp_path, SHAPE, Storage())
    _edit_tensors(tmp_path, {"lm_head.weight": mx.zeros((64, 96), mx.float16)})
    assert "head" not in load_directory(tmp_path).weights


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mistral"}, "model_type must be one of llama, qwen2, got 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"hidden_size": None}, "hidden_size must be an integer of at least 1, got 'nothing'"),
        ({"num_key_value_heads": 4}, "heads must be a multiple of key/value heads"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"type": "yarn"}}, "must be of type default, linear or llama3"),
        ({"quantization": None, "quantization_config": {"quant_method": "awq"}}, "by MLX, got awq"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "must be affine"),
        ({"quantization": {"group_size": 32, "bits": 8}}, "must have 8 bits, got 4"),
        ({"quantization": {"group_size": 48, "bits": 4}}, "packed as 2 to 8 bits in groups"),
    ],
)
def test_configs_that_are_not_computed(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    write_directory(tmp_path, SHAPE, Storage(4))
    _edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=match):
        load_directory(tmp_path)


def test_nan_weights_are_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, SHAPE, Storage())
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        name = "model.layers.0.mlp.up_proj.weight"
        values = np.zeros((160, 96), np.float32)
        values[3, 5] = np.inf
        _edit_tensors(tmp_path, {name: mx.array(values).astype(dtype)})
        with pytest.raises(ModelError, match=r"up_proj.weight must be finite"):
            load_directory(tmp_path)


def test_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, SHAPE, Storage())
    name = "model.layers.0.self_attn.q_norm.weight"
    _edit_tensors(tmp_path, {name: mx.zeros((16,), mx.float16)})
    with pytest.raises(
        ModelError, match=r"those of llama or qwen2, got model\.layers\.0\.self_attn\.q_"
    ):
        load_directory(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be readable.*config\.json"):
        load_directory(tmp_path)
    write_directory(tmp_path, SHAPE, Storage())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"\*\.safetensors files must be there, got none"):
        load_directory(tmp_path)
