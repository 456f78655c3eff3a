"""Cases of quantize.metal, norm.metal and of the scalar functions in common.metal."""

from __future__ import annotations

import numpy as np

from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal.source import load_kernels
from tests.metal_on_cpu.cases.common import (
    Float32,
    assert_same_bits,
    launcher_of,
    native,
    quantized,
    wild_rows,
)
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

# width, block, half sums
LAYOUTS = ((512, 64, False), (224, 32, False), (176, 32, True), (64, 64, False), (32, 32, True))


def _assert_activations(got: act.Activations, x: Float32, what: str) -> None:
    layout = got.layout
    q, d = quantized(x, layout.block)
    padded = np.zeros((len(x), layout.blocks * layout.block), np.float16)
    padded[:, : layout.width] = q
    sums = padded.astype(np.float32).reshape(len(x), -1, layout.sum_block).sum(axis=2)
    assert_same_bits(got.q, padded, f"{what} q")
    assert_same_bits(got.d[: d.size].reshape(d.shape), d, f"{what} d")
    assert_same_bits(got.s[: sums.size].reshape(sums.shape), sums, f"{what} s")


def quantize(factory: EmulatedKernelFactory) -> None:
    launcher, rng = launcher_of(factory), np.random.default_rng(1)
    for width, block, half in LAYOUTS:
        layout = act.ActivationLayout(width, block, 16 if half else block)
        for rows in (1, 3, 8):
            x = wild_rows(rng, rows, width)
            _assert_activations(act.quantize(launcher, x, rows, layout), x, f"{layout} {rows}")


def quantize_non_finite(factory: EmulatedKernelFactory) -> None:
    """A block with such a value gets d = NaN; other blocks and rows notice nothing."""
    launcher, rng = launcher_of(factory), np.random.default_rng(2)
    layout = act.ActivationLayout(128, 64, 64)
    for bad in (np.nan, np.inf, -np.inf, 2.0**96):
        x = wild_rows(rng, 4, 128)
        clean = act.quantize(launcher, x, 4, layout)
        x[2, 70] = bad
        got = act.quantize(launcher, x, 4, layout)
        assert np.isnan(got.d.reshape(4, 2)).tolist() == [
            [False] * 2,
            [False] * 2,
            [False, True],
            [False] * 2,
        ]
        others = np.arange(8) != 5
        assert_same_bits(got.d[others], clean.d[others])
        assert (got.q[2, 64:] == 0).all()
        assert_same_bits(got.q[:2], clean.q[:2])


def norm(factory: EmulatedKernelFactory) -> None:
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(3), native().reference
    for width, block, half in LAYOUTS:
        x = wild_rows(rng, 5, width)
        x[np.abs(x) > 2.0**40] = 7  # squares of larger values overflow, which ends the request
        weight = rng.uniform(0.5, 1.5, width).astype(np.float32)
        row_ids = launcher.upload(np.array([4, 0, 0, 3], np.int32))
        expected = np.zeros((4, width), np.float32)
        for at, row in enumerate((4, 0, 0, 3)):
            reference.rms_norm(x[row], weight, 1e-5, expected[at])
        weights = act.NormWeight(launcher.upload(weight), width, 1e-5)
        assert_same_bits(act.norm_rows(launcher, x, weights, row_ids, 4), expected, "norm")
        layout = act.ActivationLayout(width, block, 16 if half else block)
        got = act.norm_quantize(launcher, x, weights, row_ids, 4, layout)
        _assert_activations(got, expected, f"norm_quantize {layout}")


def gate(factory: EmulatedKernelFactory) -> None:
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(4), native().reference
    for width, block, half in LAYOUTS:
        x = rng.standard_normal((3, 2 * width)).astype(np.float32) * np.float32(20)
        x[:, ::7] *= np.float32(6)
        x[0, :40] = np.linspace(-130, 130, 40)[: min(40, 2 * width)]
        x[1, :32] *= np.float32(1e-22)
        expected = np.zeros((3, width), np.float32)
        for row in range(3):
            gates, ups = (np.ascontiguousarray(part) for part in np.split(x[row], 2))
            reference.silu_mul(gates, ups, expected[row])
        got = act.gate(launcher, x, 3, width)
        if factory.launch_options.flush_subnormals:
            got[np.abs(expected) < 2.0**-126] = expected[np.abs(expected) < 2.0**-126]
        assert_same_bits(got, expected, "gate")
        layout = act.ActivationLayout(width, block, 16 if half else block)
        _assert_activations(act.gate_quantize(launcher, x, 3, layout), expected, "gate_quantize")


def find_non_finite(factory: EmulatedKernelFactory) -> None:
    launcher, rng = launcher_of(factory), np.random.default_rng(5)
    x = wild_rows(rng, 9, 70)
    x[np.abs(x) > 2.0**90] = 1
    x[3, 69], x[5, 0], x[8, 33] = np.nan, 2.0**96, -np.inf
    flags = act.find_non_finite(launcher, x, 9, 70)[:9]
    assert flags.tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1]


def scalar_functions(factory: EmulatedKernelFactory) -> None:
    """recip, rsqrt, exp and the fp16 rounding over dense sweeps of their ranges."""
    reference = native().reference
    rng = np.random.default_rng(6)
    positive = np.exp2(rng.uniform(-96, 96, 4096)).astype(np.float32)
    negative = np.concatenate([rng.uniform(-41, 60, 4000), np.linspace(-40.0001, -39.9999, 96)])
    x = negative.astype(np.float32)
    halves = (rng.standard_normal(4096) * np.exp2(rng.uniform(-30, 18, 4096))).astype(np.float32)
    halves[:12] = [
        0,
        -0.0,
        65504,
        65519.9,
        65520,
        1e9,
        -1e9,
        2.0**-25,
        3 * 2.0**-26,
        2.0**-24,
        2.0**-14,
        6e-5,
    ]
    kernel = factory(
        name="scalar_functions",
        input_names=["p", "x", "h"],
        output_names=["recip", "rsqrt", "exponential", "half_bits"],
        source="""
          uint i = thread_position_in_grid.x;
          recip[i] = x1_recip(p[i]);
          rsqrt[i] = x1_rsqrt(p[i]);
          exponential[i] = x1_exp(x[i]);
          half_bits[i] = to_half_bits(h[i]);
        """,
        header=load_kernels()["quantize"].header,
    )
    got = kernel(
        inputs=[positive, x, halves],
        grid=(4096, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(4096,)] * 4,
        output_dtypes=[np.float32, np.float32, np.float32, np.uint16],
    )
    for name, argument, result in (
        ("recip", positive, got[0]),
        ("rsqrt", positive, got[1]),
        ("exp", x, got[2]),
    ):
        expected = np.empty(4096, np.float32)
        getattr(reference, name)(argument, expected)
        assert_same_bits(result, expected, name)
    bits = np.empty(4096, np.uint16)
    reference.to_f16(halves, bits)
    assert_same_bits(got[3], bits, "to_half_bits")


CASES = (quantize, quantize_non_finite, norm, gate, find_non_finite, scalar_functions)
