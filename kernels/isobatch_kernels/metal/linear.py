"""Linear layers and embeddings on the device: which kernel, which tile, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch_kernels.metal.launch import GROUP, MINIMUM
from isobatch_kernels.metal.linear_profile import (
    GEMM,
    GEMV,
    GEMV_MULTI,
    GEMV_WIDE,
    LinearProfile,
    kernel_of,
    wide_outputs,
)

if TYPE_CHECKING:
    from isobatch_kernels.metal.activations import Activations
    from isobatch_kernels.metal.arrays import ArrayLibrary, LibraryArray
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.metal.weights import PackedDense, PackedWeight

__all__ = ["GEMM", "GEMV", "GEMV_MULTI", "GEMV_WIDE", "LinearProfile"]
DENSE_ROWS = 4


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A packed weight on the device and what its kernels are compiled for."""

    packed: LibraryArray
    scales: LibraryArray
    biases: LibraryArray
    host: PackedWeight  # sizes; its arrays are dropped by `to_device`

    @property
    def shape(self) -> str:
        """Outputs, inputs and bits: layers of one shape take equally long."""
        return f"{self.host.num_outputs}x{self.host.num_inputs}/{self.host.bits}"

    def format(self) -> list[tuple[str, Any]]:
        """Template arguments of weights.metal."""
        return [
            ("BITS", self.host.bits),
            ("CENTRED", self.host.centred),
            ("G", self.host.group_size),
        ]


@dataclass(frozen=True, slots=True)
class DeviceDense:
    """A packed 16-bit matrix on the device."""

    values: LibraryArray
    bfloat: bool
    num_outputs: int
    num_inputs: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows the sum of a linear layer."""

    bias: LibraryArray | None = None  # (N,) float32
    residual: LibraryArray | None = None  # (M, N) float32
    is_logit: bool = False

    def template(self) -> list[tuple[str, Any]]:
        """Template arguments."""
        return [
            ("HAS_BIAS", self.bias is not None),
            ("HAS_RESIDUAL", self.residual is not None),
            ("IS_LOGIT", self.is_logit),
        ]

    def buffers(self, unused: LibraryArray) -> list[LibraryArray]:
        """bias and residual; `unused` fills the place of what is absent."""
        return [unused if a is None else a for a in (self.bias, self.residual)]


def quantized_linear(
    launcher: Launcher,
    path: str,
    tile: int,
    x: Activations,
    weight: DeviceWeight,
    epilogue: Epilogue,
) -> LibraryArray:
    """x @ weight.T and the epilogue, (M, N) float32.

    `tile` is R of gemv, V of gemv_multi and gemv_wide, or BM of gemm.
    """
    w = weight.host
    b = min(w.group_size, x.layout.block)
    template = [
        *weight.format(),
        ("B", b),
        ("A", x.layout.block),
        ("SB", x.layout.sum_block),
        *epilogue.template(),
        ({GEMV: "R", GEMM: "BM"}.get(path, "V"), tile),
    ]
    outputs = wide_outputs(tile) if path == GEMV_WIDE else 1
    if kernel_of(path) == GEMV_MULTI:
        template.append(("R", outputs))
    if path == GEMV and x.rows != 1:
        raise ValueError(f"[metal] gemv takes one row, got {x.rows}")
    if b < x.layout.sum_block:
        raise ValueError(f"[metal] sums must cover at most {b} elements, got {x.layout.sum_block}")
    inputs = [
        *(weight.packed, weight.scales, weight.biases, x.q, x.d, x.s),
        *epilogue.buffers(x.d),
        launcher.numbers(w.num_inputs, w.num_outputs, w.tiles, x.rows),
    ]
    grids = {
        GEMV: (1, -(-w.tiles // tile), 1),
        GEMV_MULTI: (1, -(-w.tiles // outputs), -(-x.rows // tile)),
        GEMM: (1, w.tiles, -(-x.rows // tile)),
    }
    threads = 128 if path == GEMM else GROUP
    output = [((x.rows, w.num_outputs), "float32")]
    kernel = kernel_of(path)
    return launcher.run(kernel, inputs, output, grids[kernel], threads, template)[0]


def dense_linear(
    launcher: Launcher, x: LibraryArray, rows: int, weight: DeviceDense, epilogue: Epilogue
) -> LibraryArray:
    """fp32 rows by a 16-bit matrix, (M, N) float32."""
    scaled, powers = launcher.run(
        "dense_prepare",
        [x, launcher.numbers(weight.num_inputs)],
        [
            ((max(MINIMUM, rows * weight.num_inputs),), "float32"),
            ((max(MINIMUM, rows),), "float32"),
        ],
        (1, rows, 1),
        template=[("BFLOAT", weight.bfloat)],
    )
    sizes = launcher.numbers(weight.num_inputs, weight.num_outputs, weight.tiles, rows)
    tile = min(rows, DENSE_ROWS)
    return launcher.run(
        "dense",
        [weight.values, scaled, powers, *epilogue.buffers(powers), sizes],
        [((rows, weight.num_outputs), "float32")],
        (1, weight.tiles, -(-rows // tile)),
        template=[*epilogue.template(), ("V", tile)],
    )[0]


def embed(launcher: Launcher, weight: DeviceWeight, ids: LibraryArray, tokens: int) -> LibraryArray:
    """Embedding rows of token ids, (T, K) float32."""
    width = weight.host.num_inputs
    return launcher.run(
        "embed",
        [weight.packed, weight.scales, weight.biases, ids, launcher.numbers(width)],
        [((tokens, width), "float32")],
        (-(-width // GROUP), tokens, 1),
        template=weight.format(),
    )[0]


def embed_dense(
    launcher: Launcher, values: LibraryArray, width: int, ids: LibraryArray, tokens: int
) -> LibraryArray:
    """Rows of an unpacked (N, K) 16-bit matrix, (T, K) float32."""
    return launcher.run(
        "embed_dense",
        [values, ids, launcher.numbers(width)],
        [((tokens, width), "float32")],
        (-(-width // GROUP), tokens, 1),
    )[0]


def to_device(arrays: ArrayLibrary, packed: PackedWeight) -> DeviceWeight:
    """Moves a packed weight to the device."""
    return DeviceWeight(
        arrays.array(packed.packed),
        arrays.array(packed.scales),
        arrays.array(packed.biases),
        packed.without_arrays(),
    )


def dense_to_device(arrays: ArrayLibrary, packed: PackedDense) -> DeviceDense:
    """Moves a packed 16-bit matrix to the device."""
    return DeviceDense(
        arrays.array(packed.values),
        packed.bfloat,
        packed.num_outputs,
        packed.num_inputs,
        packed.tiles,
    )
