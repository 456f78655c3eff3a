"""Cases of gemv.metal, gemv_multi.metal, gemm.metal, dense.metal and embed.metal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal import weights as packing
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.program import DenseType, DenseWeight, QuantizedWeight
from tests.metal_on_cpu.cases.common import (
    Float32,
    assert_same_bits,
    launcher_of,
    native,
    quantized,
    wild_rows,
)
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format and the activation block that meets it."""

    bits: int
    group_size: int
    block: int
    half: bool = True  # scales are float16

    def __str__(self) -> str:
        return f"{self.bits}bit-g{self.group_size}-a{self.block}-{'f16' if self.half else 'f32'}"


FORMATS = (
    *(Format(4, g, a) for g, a in ((32, 32), (64, 64), (128, 64), (16, 32), (64, 32))),
    *(Format(8, g, a) for g, a in ((32, 32), (64, 64), (128, 64), (16, 32))),
    *(Format(2, 64, 64), Format(3, 32, 32), Format(5, 32, 32), Format(6, 64, 64)),
    *(Format(4, 64, 64, half=False), Format(8, 32, 32, half=False)),
)


def make_weight(rng: np.random.Generator, outputs: int, inputs: int, f: Format) -> QuantizedWeight:
    """Random integers with rows of extremes, scales of both signs, some below the floor."""
    packed = rng.integers(0, 2**32, (outputs, inputs * f.bits // 32), dtype=np.uint32)
    packed[::7] = 0xFFFFFFFF
    packed[3::7] = 0
    shape = (outputs, inputs // f.group_size)
    scales = rng.uniform(-0.03, 0.03, shape)
    scales[rng.random(shape) < 0.05] = 3e-8
    biases = scales * -(2 ** (f.bits - 1)) + rng.uniform(-0.01, 0.01, shape)
    kind = np.float16 if f.half else np.float32
    return QuantizedWeight(packed, scales.astype(kind), biases.astype(kind), f.bits, f.group_size)


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One layer with its inputs and the reference's results, row by row."""

    format: Format
    weight: QuantizedWeight
    x: Float32
    bias: Float32
    residual: Float32
    expected: Float32  # with bias and residual
    plain: Float32  # without

    @property
    def layout(self) -> act.ActivationLayout:
        f = self.format
        return act.ActivationLayout(self.x.shape[1], f.block, 16 if f.group_size == 16 else f.block)


def make_case(f: Format, outputs: int, groups: int, rows: int, seed: int = 0) -> LinearCase:
    """A layer of `groups` groups along K."""
    rng = np.random.default_rng((seed, f.bits, f.group_size, outputs))
    reference = native().reference
    inputs = groups * max(f.group_size, 32 if f.bits % 2 else f.group_size)
    weight = make_weight(rng, outputs, inputs, f)
    x = wild_rows(rng, rows, inputs)
    bias = rng.standard_normal(outputs).astype(np.float32)
    residual = rng.standard_normal((rows, outputs)).astype(np.float32)
    integers = packing.unpack(weight).astype(np.int16) - np.int16(128 if f.bits == 8 else 0)
    scales, biases = packing.affine(weight)
    q, d = quantized(x, f.block)
    expected, plain = np.empty((2, rows, outputs), np.float32)
    for row in range(rows):
        common = (integers, scales, biases, f.block, q[row], d[row])
        reference.linear(*common, bias, residual[row], expected[row])
        reference.linear(*common, None, None, plain[row])
    return LinearCase(f, weight, x, bias, residual, expected, plain + np.float32(0))


def run_case(launcher: Launcher, case: LinearCase, rows: int, path: str, tile: int) -> None:
    """The first `rows` rows by one kernel, with and without an epilogue."""
    x = act.quantize(launcher, np.ascontiguousarray(case.x[:rows]), rows, case.layout)
    device = lin.to_device(launcher.arrays, packing.pack_quantized([case.weight])[0])
    residual = np.concatenate([case.residual[:rows].reshape(-1), np.zeros(8, np.float32)])
    full = lin.Epilogue(bias=launcher.upload(case.bias), residual=residual)
    got = lin.quantized_linear(launcher, path, tile, x, device, full)
    sizes = f"N={case.weight.num_outputs} K={case.weight.num_inputs} M={rows}"
    what = f"{case.format} {sizes} {path}/{tile}"
    assert_same_bits(got, case.expected[:rows], what)
    if rows in (1, 2, 33):
        got = lin.quantized_linear(launcher, path, tile, x, device, lin.Epilogue(is_logit=True))
        assert_same_bits(got, case.plain[:rows], f"{what}, logits")


def quantized_layers(factory: EmulatedKernelFactory) -> None:
    """The three kernels on the main formats: few and odd groups, ragged outputs."""
    launcher = launcher_of(factory)
    for f in (FORMATS[0], FORMATS[1], FORMATS[3], FORMATS[6]):
        for outputs, groups in ((45, 5), (33, 11)):
            case = make_case(f, outputs, groups, 35)
            run_case(launcher, case, 1, lin.GEMV, 1)
            run_case(launcher, case, 1, lin.GEMV, 2)
            run_case(launcher, case, 3, lin.GEMV_MULTI, 4)
            run_case(launcher, case, 35, lin.GEMV_MULTI, 12)
            run_case(launcher, case, 3, lin.GEMV_WIDE, 2)
            run_case(launcher, case, 35, lin.GEMV_WIDE, 8)
            run_case(launcher, case, 2, lin.GEMM, 32)
            run_case(launcher, case, 35, lin.GEMM, 32)


def dense_layers(factory: EmulatedKernelFactory) -> None:
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(7), native().reference
    for dtype, inputs, outputs in (
        (DenseType.FLOAT16, 100, 33),
        (DenseType.BFLOAT16, 77, 40),
        (DenseType.FLOAT16, 5, 8),
    ):
        values = (rng.standard_normal((outputs, inputs)) * 0.1).astype(np.float32)
        values.reshape(-1)[::11] *= np.float32(1e-13)
        bfloat = dtype is DenseType.BFLOAT16
        if bfloat:
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
            widened = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            stored = values.astype(np.float16)
            widened = stored.astype(np.float32)
        packed = packing.pack_dense([DenseWeight(stored, dtype)])[0]
        device = lin.dense_to_device(launcher.arrays, packed)
        for rows in (1, 2, 9):
            x = wild_rows(rng, rows, inputs)
            x[0] *= np.float32(2.0**-31) if rows == 9 else np.float32(1)
            bias = rng.standard_normal(outputs).astype(np.float32)
            residual = rng.standard_normal((rows, outputs)).astype(np.float32)
            expected = np.empty((rows, outputs), np.float32)
            for row in range(rows):
                assert reference.dense_linear(
                    widened, bfloat, x[row], bias, residual[row], expected[row]
                )
            flat = np.concatenate([x.reshape(-1), np.zeros(8, np.float32)])
            epilogue = lin.Epilogue(bias=launcher.upload(bias), residual=launcher.upload(residual))
            got = lin.dense_linear(launcher, flat, rows, device, epilogue)
            assert_same_bits(got, expected, f"{dtype} {rows}")


def embeddings(factory: EmulatedKernelFactory) -> None:
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(8), native().reference
    ids = np.array([0, 33, 69, 1, 32, 31, 5, 69, 2], np.int32)
    for f in (FORMATS[0], FORMATS[3], FORMATS[6], FORMATS[11]):
        weight = make_weight(rng, 70, 9 * f.group_size if f.bits != 5 else 288, f)
        integers = packing.unpack(weight).astype(np.int16) - np.int16(128 if f.bits == 8 else 0)
        scales, biases = packing.affine(weight)
        expected = np.empty((len(ids), weight.num_inputs), np.float32)
        for at, token in enumerate(ids):
            reference.embed(integers, scales, biases, int(token), expected[at])
        device = lin.to_device(launcher.arrays, packing.pack_quantized([weight])[0])
        got = lin.embed(launcher, device, launcher.upload(ids), len(ids))
        assert_same_bits(got, expected, str(f))
    values = rng.standard_normal((70, 52)).astype(np.float16)
    got = lin.embed_dense(launcher, values, 52, launcher.upload(ids), len(ids))
    assert_same_bits(got, values[ids].astype(np.float32), "dense")
    bits = (rng.standard_normal((70, 52)).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    got = lin.embed_dense(launcher, bits, 52, launcher.upload(ids), len(ids))
    assert_same_bits(got, (bits[ids].astype(np.uint32) << 16).view(np.float32), "bfloat16")


CASES = (quantized_layers, dense_layers, embeddings)
