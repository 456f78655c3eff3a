"""Reads a teacher's matrices from a GGUF file and writes a student's.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and, for the blocks,
ggml-common.h there. A block is 32 neighbours of a row: Q8_0 is w = d*q, Q4_1 is w = d*q + m, with
d and m in fp16.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from executor_service.models.gguf_header import TENSOR_TYPES, GgufHeader, TensorInfo, read_header

Float32 = npt.NDArray[np.float32]

BLOCK: Final = 32
LEVELS: Final = 15  # of 4 bits, above the smallest
_ALIGNMENT: Final = 32
_TYPE_CODES: Final = {kind.name: code for code, kind in TENSOR_TYPES.items()}
_Q4_1: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK // 2)])
_Q8_0: Final = np.dtype([("d", "<f2"), ("q", "i1", BLOCK)])


def q4_1_blocks(values: Float32) -> npt.NDArray[np.void]:
    """Quantise (..., K) fp32 values; return (elements/32,) blocks as they are stored.

    Smallest and largest value of a block are its ends. Rounded are first m and d, to fp16, and then
    q = rint((w - m) / d): so what training rounds (`student.round_weights`) is what is stored.
    """
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    low = rows.min(1)
    step = ((rows.max(1) - low) / np.float32(LEVELS)).astype("<f2")
    least = low.astype("<f2")
    wide = step.astype(np.float32)
    safe = np.where(wide > 0, wide, np.float32(1))[:, None]
    levels = np.rint((rows - least.astype(np.float32)[:, None]) / safe)
    q = np.clip(levels, 0, LEVELS).astype(np.uint8)
    blocks = np.zeros(len(rows), _Q4_1)
    blocks["d"], blocks["m"] = step, least
    blocks["q"] = q[:, : BLOCK // 2] | (q[:, BLOCK // 2 :] << 4)
    return blocks


def _dequantised_q4_1(raw: bytes) -> Float32:
    blocks = np.frombuffer(raw, _Q4_1)
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
    d, m = (blocks[name].astype(np.float32)[:, None] for name in ("d", "m"))
    return np.asarray(d * q + m, np.float32)


def _dequantised_q8_0(raw: bytes) -> Float32:
    blocks = np.frombuffer(raw, _Q8_0)
    return np.asarray(blocks["d"].astype(np.float32)[:, None] * blocks["q"], np.float32)


def dequantised(info: TensorInfo, raw: bytes) -> Float32:
    """Return a tensor's values, of its shape; raises ValueError for a type that is not read."""
    match info.type.name:
        case "F32":
            values = np.frombuffer(raw, "<f4").astype(np.float32)
        case "Q4_1":
            values = _dequantised_q4_1(raw)
        case "Q8_0":
            values = _dequantised_q8_0(raw)
        case other:
            raise ValueError(f"[gguf] {info.name} must be F32, Q4_1 or Q8_0, got {other}")
    return values.reshape(info.shape)


def read_gguf(path: Path) -> tuple[GgufHeader, dict[str, Float32]]:
    """Return a file's header and all tensors, dequantised, under their own names."""
    data = path.read_bytes()
    header = read_header(memoryview(data), str(path))
    tensors = {
        name: dequantised(info, data[info.offset : info.offset + info.num_bytes])
        for name, info in header.tensors.items()
    }
    return header, tensors


def halves(rows: Float32, head_dim: int) -> Float32:
    """Reorder rows of q or k from a Llama file's rotary pairs (2i, 2i+1) to (i, i + head_dim/2)."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def interleaved(rows: Float32, head_dim: int) -> Float32:
    """Undo `halves`."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list() if all(isinstance(each, str) for each in value):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(f"[gguf] metadata must be of a known type, got {type(value)}")


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Float32]
) -> dict[str, Float32]:
    """Write a version 3 file, matrices in Q4_1 and vectors in F32; return the stored values.

    Raises ValueError for a matrix whose rows are no multiple of 32.
    """
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    body: list[bytes] = []
    stored: dict[str, Float32] = {}
    offset = 0
    for name, values in tensors.items():
        if values.ndim == 1:
            kind, raw = "F32", values.astype("<f4").tobytes()
            stored[name] = values.astype(np.float32)
        elif values.shape[-1] % BLOCK == 0:
            kind, raw = "Q4_1", q4_1_blocks(values).tobytes()
            stored[name] = _dequantised_q4_1(raw).reshape(values.shape)
        else:
            raise ValueError(f"[gguf] rows of {name} must be multiples of 32, got {values.shape}")
        header += _string(name) + _dimensions(values.shape)
        header += struct.pack("<IQ", _TYPE_CODES[kind], offset)
        body += [raw, bytes(-len(raw) % _ALIGNMENT)]
        offset += len(raw) + len(body[-1])
    path.write_bytes(b"".join([header, bytes(-len(header) % _ALIGNMENT), *body]))
    return stored


def _dimensions(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
