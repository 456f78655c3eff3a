"""Reads and checks the header of a GGUF file, so that nothing else has to trust the file.

The loader behind `mx.load` follows lengths and offsets blindly and may crash the process on a
damaged file. Here every length is checked against the file's size first. Only the header is read.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor_service.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_NAME_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage of a tensor: `block_bytes` for every `block_size` elements of a row."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    30: TensorType("BF16", 1, 2),
}
# Known but not computed, for messages.
OTHER_TYPES: Final[Mapping[int, str]] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
}  # fmt: skip

_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in numpy
    type: TensorType
    offset: int  # of its first byte in the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a checked file."""

    metadata: Mapping[str, object]  # str, bool, int, float, or a list of one of them
    tensors: Mapping[str, TensorInfo]


class _Reader:
    def __init__(self, data: memoryview, source: str) -> None:
        self._data = data
        self._source = source
        self.position = 0

    def fail(self, rule: str, got: object) -> ModelError:
        return ModelError(f"[gguf] {rule}, got {got!r:.80}: {self._source}")

    @property
    def remaining(self) -> int:
        return len(self._data) - self.position

    def take(self, size: int, what: str) -> memoryview:
        if size > self.remaining:
            raise self.fail(
                f"{what} must end inside the file", f"{size - self.remaining} bytes past it"
            )
        start = self.position
        self.position += size
        return self._data[start : self.position]

    def scalar(self, code: str, what: str) -> int | float:
        value: int | float = struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]
        return value

    def count(self, what: str, bytes_each: int) -> int:
        """Read a 64-bit count of things that take at least `bytes_each` bytes each."""
        value = int(self.scalar("Q", what))
        if value * bytes_each > self.remaining:
            raise self.fail(f"{what} must fit in the file", value)
        return value

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.count(what, 1), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} must be UTF-8", raw) from None

    def strings(self, count: int, what: str) -> list[str]:
        # The hot loop of a file's start: a vocabulary and its merges are 100,000 strings.
        data, position, end = self._data, self.position, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            if position + 8 > end:
                raise self.fail(f"{what} must end inside the file", f"{len(values)} strings")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise self.fail(f"{what} must end inside the file", f"{len(values)} strings")
            try:
                values.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError:
                raise self.fail(f"{what} must be UTF-8", bytes(data[start:position])) from None
        self.position = position
        return values

    def value(self, kind: int, what: str) -> object:
        if kind == _STRING:
            return self.string(what)
        if kind == _BOOL:
            return self.boolean(int(self.scalar("B", what)), what)
        if kind == _ARRAY:
            return self.array(what)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"{what} must have a known type", kind)
        return self.scalar(code, what)

    def boolean(self, value: int, what: str) -> bool:
        if value > 1:
            raise self.fail(f"{what} must be 0 or 1", value)
        return value == 1

    def array(self, what: str) -> list[object]:
        kind = int(self.scalar("I", what))
        if kind == _STRING:
            return [*self.strings(self.count(what, 8), what)]
        if kind == _BOOL:
            raw = self.take(self.count(what, 1), what)
            return [self.boolean(value, what) for value in raw]
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"elements of {what} must be numbers, booleans or strings", kind)
        size = struct.calcsize(code)
        count = self.count(what, size)
        return list(struct.unpack(f"<{count}{code}", self.take(count * size, what)))


def read_header(data: memoryview, source: str) -> GgufHeader:
    """Check a whole file's header and where its tensors lie.

    `data` is the file, for example over a memory map; `source` names it in messages. Raises
    ModelError for anything that is not a complete GGUF file of supported tensor types.
    """
    reader = _Reader(data, source)
    magic = bytes(data[:4])
    if magic != MAGIC:
        raise reader.fail(f"the file must start with {MAGIC!r}", magic)
    reader.position = 4
    version = int(reader.scalar("I", "the version"))
    if version not in VERSIONS:
        raise reader.fail(f"the version must be one of {VERSIONS}", version)
    num_tensors = reader.count("the number of tensors", 32)
    num_entries = reader.count("the number of metadata entries", 13)
    metadata = _read_metadata(reader, num_entries)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise reader.fail("general.alignment must be a power of two of at least 8", alignment)
    raw = [_read_tensor_info(reader) for _ in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in raw:
        if info.offset % alignment:
            raise reader.fail(f"tensor {info.name} must be aligned to {alignment}", info.offset)
        if info.name in tensors:
            raise reader.fail("tensor names must be unique", info.name)
        start = data_start + info.offset
        if start + info.num_bytes > len(data):
            past = start + info.num_bytes - len(data)
            raise reader.fail(
                f"tensor {info.name} must end inside the file, as in a complete download",
                f"{past} bytes past it",
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.num_bytes)
    _require_disjoint(reader, tensors)
    return GgufHeader(metadata, tensors)


def _read_metadata(reader: _Reader, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = reader.string("a metadata key")
        if key in metadata:
            raise reader.fail("metadata keys must be unique", key)
        metadata[key] = reader.value(int(reader.scalar("I", f"the type of {key}")), key)
    return metadata


def _read_tensor_info(reader: _Reader) -> TensorInfo:
    """Read one entry; its offset is still relative to the data section."""
    name = reader.string("a tensor name")
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise reader.fail(f"tensor names must have 1 to {MAX_NAME_BYTES} bytes", name)
    rank = int(reader.scalar("I", f"the rank of {name}"))
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise reader.fail(f"tensor {name} must have 1 to {MAX_DIMENSIONS} dimensions", rank)
    dimensions = [int(reader.scalar("Q", f"the shape of {name}")) for _ in range(rank)]
    if any(not 0 < size < 2**31 for size in dimensions):
        raise reader.fail(f"dimensions of tensor {name} must be positive", dimensions)
    code = int(reader.scalar("I", f"the type of {name}"))
    kind = TENSOR_TYPES.get(code)
    if kind is None:
        known = ", ".join(entry.name for entry in TENSOR_TYPES.values())
        raise reader.fail(f"tensor {name} must be of type {known}", OTHER_TYPES.get(code, code))
    if dimensions[0] % kind.block_size:
        raise reader.fail(
            f"rows of tensor {name} must be a multiple of {kind.block_size}", dimensions[0]
        )
    num_bytes = math.prod(dimensions) // kind.block_size * kind.block_bytes
    offset = int(reader.scalar("Q", f"the offset of {name}"))
    return TensorInfo(name, tuple(reversed(dimensions)), kind, offset, num_bytes)


def _require_disjoint(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> None:
    end = 0
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset < end:
            raise reader.fail("tensors must not overlap", info.name)
        end = info.offset + info.num_bytes
