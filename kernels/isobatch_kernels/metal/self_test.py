"""The start-up check on the device: which kernels give class X1's bits here?

What a compiler or a matrix unit does cannot be known ahead, so each kernel path is compared with
the contract on odd shapes before it is used, and left out, aloud, where one bit differs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal import weights as packing
from isobatch_kernels.metal.exact import linear as exact_linear
from isobatch_kernels.program import Linear, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch_kernels.metal.exact import Float32
    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.program import Program

# bits, group size, activation block, inputs, outputs
_SHAPES = (
    (4, 64, 64, 320, 33),
    (4, 64, 64, 2048, 70),
    (4, 32, 32, 96, 31),
    (4, 32, 32, 1184, 40),
    (4, 128, 64, 640, 32),
    (4, 64, 32, 448, 34),
    (4, 128, 32, 384, 41),
    (4, 16, 32, 224, 45),
    (8, 64, 64, 704, 37),
    (8, 32, 32, 352, 64),
    (8, 128, 64, 1152, 20),
    (8, 64, 32, 320, 36),
    (8, 128, 32, 256, 33),
    (8, 16, 32, 224, 31),
    (5, 32, 32, 288, 35),
    (6, 64, 64, 448, 30),
)
_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 17, 24, 31, 33, 65)
# More shapes of each format, by fewer row counts: groups of inputs, outputs. Slices of K are empty,
# one block and several blocks long; outputs lie around tiles of 32.
_MORE = ((1, 1), (2, 31), (3, 33), (7, 65), (9, 40), (17, 95))
_FEWER_ROWS = (1, 2, 5, 8, 24, 25, 33)

Shape = tuple[int, int, int, int, int]
Format = tuple[int, int, int]  # bits of storage, group size, activation block

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run of one kernel path."""

    path: str
    shape: Shape
    rows: int
    equal: bool


def _weight(
    rng: np.random.Generator, bits: int, group: int, inputs: int, n: int
) -> QuantizedWeight:
    packed = rng.integers(0, 2**32, (n, inputs * bits // 32), dtype=np.uint32)
    packed[::5] = 0xFFFFFFFF
    packed[2::5] = 0
    # Exponents far apart, so that an order of sums other than the contract's shows.
    scales = rng.uniform(-1, 1, (n, inputs // group)) * np.exp2(
        rng.integers(-12, 3, (n, inputs // group))
    )
    biases = rng.uniform(-1, 1, scales.shape) * np.exp2(rng.integers(-12, 5, scales.shape))
    return QuantizedWeight(
        packed, scales.astype(np.float16), biases.astype(np.float16), bits, group
    )


def _rows(rng: np.random.Generator, count: int, width: int) -> Float32:
    x = rng.standard_normal((count, width)) * np.exp2(rng.integers(-12, 12, (count, width)))
    x[:, ::17] = 0
    return x.astype(np.float32)


def formats_of(program: Program) -> set[Format]:
    """Formats of the program's quantised layers."""
    blocks = {b.name: b.activation_block for b in program.buffers}
    return {
        (4 if w.bits <= 4 else 8, w.group_size, blocks[op.x])
        for op in program.ops
        if isinstance(op, Linear)
        for w in op.weights
        if isinstance(w, QuantizedWeight)
    }


def compare(
    launcher: Launcher, profile: lin.LinearProfile, formats: set[Format] | None = None
) -> Iterator[Comparison]:
    """Runs every path that the profile can take on odd shapes and row counts.

    `formats` limits the work to these; by default every format is run.
    """
    rng = np.random.default_rng(1)
    for shape, row_counts in _odd_shapes(formats):
        bits, group, block, inputs, outputs = shape
        weight = _weight(rng, bits, group, inputs, outputs)
        device = lin.to_device(launcher.arrays, packing.pack_quantized([weight])[0])
        x = _rows(rng, max(row_counts), inputs)
        expected = exact_linear(weight, x, block)
        layout = act.ActivationLayout(inputs, block, 16 if group == 16 else block)
        for rows in row_counts:
            several = replace(profile, use_gemv=False, use_gemm=False)
            ways = {profile.choose(rows), several.choose(rows), *profile.ways(rows)}
            ways |= {(lin.GEMM, tile) for tile in profile.gemm_rows}
            quantised = act.quantize(launcher, launcher.arrays.array(x[:rows]), rows, layout)
            for path, tile in sorted(ways):
                y = lin.quantized_linear(launcher, path, tile, quantised, device, lin.Epilogue())
                got = launcher.arrays.numpy(y)
                equal = got.tobytes() == expected[:rows].tobytes()
                yield Comparison(path, shape, rows, equal)


def _odd_shapes(formats: set[Format] | None) -> Iterator[tuple[Shape, tuple[int, ...]]]:
    """Shapes of these formats, and the row counts to run them with."""
    seen: set[Format] = set()
    for shape in _SHAPES:
        bits, group, block, _, _ = shape
        of = (4 if bits <= 4 else 8, group, block)
        if formats is not None and of not in formats:
            continue
        yield shape, _ROWS
        if of not in seen:
            seen.add(of)
            for parts, outputs in _MORE:
                yield (bits, group, block, parts * max(group, block), outputs), _FEWER_ROWS


@dataclass(frozen=True, slots=True)
class Verified:
    """What the self-test found: a profile that is right, and how it came about."""

    profile: lin.LinearProfile
    num_cases: int
    refused: tuple[str, ...]  # kernel paths that are not used


def verified_profile(
    launcher: Launcher, profile: lin.LinearProfile, formats: set[Format] | None = None
) -> Verified:
    """The profile without the paths that differ on this device.

    Each format costs a dozen compiled kernels, so a model's start names its own.

    Raises:
        RuntimeError: gemv_multi differs, which everything falls back to.
    """
    wrong: dict[str, Comparison] = {}
    results = list(compare(launcher, profile, formats))
    for result in results:
        if not result.equal:
            wrong.setdefault(result.path, result)
    for path, result in wrong.items():
        _log.warning(
            "Metal kernel %s differs from the contract (bits, group, block, inputs, outputs %s; %d"
            " rows); it is not used on this device",
            path,
            result.shape,
            result.rows,
        )
    if lin.GEMV_MULTI in wrong:
        raise RuntimeError("[metal] gemv_multi must equal the contract, got other bits")
    right = replace(
        profile,
        use_gemv=profile.use_gemv and lin.GEMV not in wrong,
        use_gemm=profile.use_gemm and lin.GEMM not in wrong,
        wide_tiles=() if lin.GEMV_WIDE in wrong else profile.wide_tiles,
    )
    return Verified(right, len(results), tuple(sorted(wrong)))
