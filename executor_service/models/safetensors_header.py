"""Reads and checks the header of a safetensors file before anything trusts it.

Layout: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeGuard

from executor_service.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_HEADER_BYTES: Final = 100_000_000
ELEMENT_BYTES: Final[Mapping[str, int]] = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int


def read_header(data: memoryview, source: str) -> Mapping[str, TensorInfo]:
    """Check a whole file's header; `data` is the file. Raises ModelError."""

    def fail(rule: str, got: object) -> ModelError:
        return ModelError(f"[safetensors] {rule}, got {got!r:.80}: {source}")

    if len(data) < 8:
        raise fail("the file must hold a header", f"{len(data)} bytes")
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise fail("the header must fit in the file", f"{length} bytes")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise fail("the header must be JSON", bytes(data[8:40])) from None
    if not isinstance(header, dict):
        raise fail("the header must be an object", type(header).__name__)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(name, entry, start, fail) for name, entry in header.items()}
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
        if info.offset != end:
            raise fail("tensors must follow each other without gaps", info.name)
        end = info.offset + info.num_bytes
    if end != len(data):
        raise fail(
            f"tensors must end where the file ends ({len(data)} bytes), as in a complete download",
            end,
        )
    return tensors


def _tensor(
    name: str, entry: object, start: int, fail: Callable[[str, object], ModelError]
) -> TensorInfo:
    if not isinstance(entry, dict):
        raise fail(f"the entry of {name} must be an object", entry)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise fail(f"{name} must be of type {', '.join(ELEMENT_BYTES)}", dtype)
    if not _are_sizes(shape) or len(shape) > 4:
        raise fail(f"the shape of {name} must be a list of sizes", shape)
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise fail(f"the offsets of {name} must be two numbers", offsets)
    num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise fail(f"{name} of shape {shape} must have {num_bytes} bytes", offsets)
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], num_bytes)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**48 for value in values
    )
