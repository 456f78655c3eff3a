"""Damaged and foreign GGUF files are refused with the file's name, before anything trusts them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.errors import ModelError
from executor_service.models.gguf import load_gguf, read_gguf_header
from executor_service.models.gguf_header import read_header
from tests.support.tiny_gguf import gguf_bytes, gguf_metadata, write_gguf
from tests.support.tiny_model import TinyShape

SHAPE = TinyShape(num_layers=1, vocab_size=64)
ONE = {"a": ("F32", (2, 3), bytes(24))}


def _refused(data: bytes, match: str) -> None:
    with pytest.raises(ModelError, match=match) as raised:
        read_header(memoryview(data), "some.gguf")
    assert str(raised.value).endswith("some.gguf")


def test_reads_metadata_and_tensors() -> None:
    metadata: dict[str, object] = {
        "s": "text", "b": True, "i": 7, "f": 0.5, "strings": ["a", "é", ""], "ints": [1, -2],
    }  # fmt: skip
    header = read_header(memoryview(gguf_bytes(metadata, ONE)), "x")
    assert header.metadata == metadata
    info = header.tensors["a"]
    assert (info.shape, info.type.name, info.num_bytes) == ((2, 3), "F32", 24)


@pytest.mark.parametrize("version", [2, 3])
def test_accepts_versions_2_and_3(version: int) -> None:
    assert read_header(memoryview(gguf_bytes({}, ONE, version)), "x").tensors


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_refuses_other_versions_and_byte_orders(version: int) -> None:
    _refused(gguf_bytes({}, ONE, version), r"version must be one of \(2, 3\)")


def test_refuses_another_kind_of_file() -> None:
    _refused(b"PK\x03\x04" + bytes(100), "must start with b'GGUF', got b'PK")


def test_refuses_every_truncation() -> None:
    whole = gguf_bytes({"k": "v", "l": ["a", "b"], "n": [1, 2]}, ONE)
    read_header(memoryview(whole), "x")
    # The last 8 bytes are padding behind the tensor, which nobody reads.
    for length in range(len(whole) - 8):
        _refused(whole[:length], r"\[gguf\]")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"a": ("Q4_0", (2, 33), bytes(64))}, "rows of tensor a must be a multiple of 32"),
        ({"a": ("F32", (2, 2, 1, 1, 1), bytes(16))}, "1 to 4 dimensions, got 5"),
        ({"": ("F32", (1,), bytes(4))}, "tensor names must have 1 to 64 bytes"),
        ({"n" * 65: ("F32", (1,), bytes(4))}, "tensor names must have 1 to 64 bytes"),
    ],
)
def test_refuses_tensors_that_cannot_be(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], match: str
) -> None:
    _refused(gguf_bytes({}, tensors), match)


def test_refuses_types_that_are_not_computed() -> None:
    data = bytearray(gguf_bytes({}, ONE))
    at = 24 + 9 + 4 + 16  # behind the file's head, the name, the rank and two dimensions
    data[at : at + 4] = struct.pack("<I", 12)
    _refused(bytes(data), "must be of type F32, F16, Q4_0, Q4_1, Q8_0, BF16, got 'Q4_K'")


def test_refuses_overlapping_tensors() -> None:
    tensors = {"a": ("F32", (16,), bytes(64)), "b": ("F32", (16,), bytes(64))}
    data = bytearray(gguf_bytes({}, tensors))
    at = data.index(struct.pack("<Q", 64), 40)
    data[at : at + 8] = struct.pack("<Q", 32)
    _refused(bytes(data), "tensors must not overlap, got 'b'")


def test_refuses_a_count_that_the_file_cannot_hold() -> None:
    data = bytearray(gguf_bytes({"k": "v"}, ONE))
    data[16:24] = struct.pack("<Q", 2**62)
    _refused(bytes(data), "number of metadata entries must fit")


def test_refuses_a_bad_alignment() -> None:
    _refused(gguf_bytes({"general.alignment": 12}, ONE), "power of two of at least 8, got 12")


@given(data=st.data())
def test_changed_bytes_are_refused_or_read(data: st.DataObject) -> None:
    """Whatever a header says, reading it ends with a header or a ModelError."""
    whole = bytearray(gguf_bytes({"k": "v", "l": ["a", "b"], "n": [1, 2], "b": True}, ONE))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = read_header(memoryview(bytes(whole)), "x")
    except ModelError:
        return
    for info in header.tensors.values():
        assert info.offset + info.num_bytes <= len(whole)


def test_a_truncated_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, SHAPE, "Q4_1")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"must end inside the file.*complete download.*cut\.gguf"):
        read_gguf_header(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "foreign.gguf"
    tensors = {"blk.0.attn_q_norm.weight": ("F32", (16,), bytes(64))}
    path.write_bytes(gguf_bytes(gguf_metadata(SHAPE), tensors))
    with pytest.raises(ModelError, match=r"those of llama or qwen2, got blk\.0\.attn_q_norm"):
        load_gguf(path, read_gguf_header(path))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "foreign.gguf"
    tensors = {"token_embd.weight": ("F16", (64, 32), bytes(4096))}
    metadata = gguf_metadata(SHAPE) | {"general.architecture": "mamba"}
    path.write_bytes(gguf_bytes(metadata, tensors))
    with pytest.raises(ModelError, match="must be one of llama, qwen2, got 'mamba'"):
        load_gguf(path, read_gguf_header(path))


def test_nan_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    raw = b"\x00\x7e" * (64 * 32)  # fp16 NaN
    path.write_bytes(
        gguf_bytes(gguf_metadata(SHAPE), {"token_embd.weight": ("F16", (64, 32), raw)})
    )
    with pytest.raises(ModelError, match=r"token_embd.weight must be finite, got a NaN.*nan\.gguf"):
        load_gguf(path, read_gguf_header(path))


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be readable"):
        read_gguf_header(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="must not be empty"):
        read_gguf_header(tmp_path / "empty.gguf")
