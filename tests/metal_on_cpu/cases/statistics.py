"""Cases of statistics.metal and top_k.metal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from isobatch_kernels.metal.statistics import (
    DeviceStatistics,
    read_statistics,
    row_statistics,
    take_tokens,
)
from isobatch_kernels.step import Stat, StepInput
from tests.metal_on_cpu.cases.common import Float32, assert_same_bits, launcher_of, native
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

ALL = Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE


def step_of(rng: np.random.Generator, width: int, rows: int, asked: list[int]) -> StepInput:
    """A step that wants `rows` positions; row i asks for asked[i % len(asked)]."""
    edits = rng.integers(0, 4, rows)
    starts = np.concatenate([[0], np.cumsum(edits)]).astype(np.int32)
    count = int(starts[-1])
    return StepInput(
        token_ids=np.zeros(rows, np.int32),
        positions=np.zeros(rows, np.int32),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        block_tables=np.zeros((rows, 1), np.int32),
        wanted=np.arange(rows, dtype=np.int32),
        statistics=np.array([asked[i % len(asked)] for i in range(rows)], np.uint32),
        top_k=rng.integers(1, min(width, 70) + 1, rows).astype(np.int32),
        inverse_temperatures=rng.choice(np.array([0, 0.7, 1, 1.3, 20], np.float32), rows),
        quantiles=rng.uniform(0, 1, rows).astype(np.float32),
        edit_starts=starts,
        edit_ids=rng.integers(0, width, count).astype(np.int32),
        edit_values=rng.choice(np.array([-5, 3, 1e-20, 0.5], np.float32), count),
    )


def logits_of(rng: np.random.Generator, width: int, rows: int) -> Float32:
    """Rows with ties, far outliers and equal values."""
    x = (rng.standard_normal((rows, width)) * 4).astype(np.float32)
    x[0] = np.round(x[0])
    x[-1] = np.float32(1.5)
    if rows > 2:
        x[1, width // 2] = 80
    return x + np.float32(0)


def statistics(factory: EmulatedKernelFactory) -> None:
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(11), native().reference
    for width, rows in ((1100, 5), (3000, 3), (300, 4), (40, 2), (1024, 1)):
        asked = [int(ALL), int(Stat.ARGMAX), int(Stat.TOP_K), int(Stat.QUANTILE | Stat.NORMALIZER)]
        step, logits = step_of(rng, width, rows, asked), logits_of(rng, width, rows)
        got = read_statistics(launcher.arrays, row_statistics(launcher, logits.copy(), width, step))
        for row in range(rows):
            bits, edits = (
                int(step.statistics[row]),
                slice(*step.edit_starts[row : row + 2].tolist()),
            )
            count = int(step.top_k[row]) if bits & Stat.TOP_K else 0
            ids, values, weights = np.empty(count, np.int32), *np.empty((2, count), np.float32)
            edited = logits[row].copy()
            argmax, largest, z, quantile = reference.statistics(
                edited,
                bool(bits & Stat.NORMALIZER),
                bool(bits & Stat.QUANTILE),
                float(step.inverse_temperatures[row]),
                float(step.quantiles[row]),
                step.edit_ids[edits],
                step.edit_values[edits],
                ids,
                values,
                weights,
            )
            what, top = f"V={width} row {row}", slice(*got.top_k_starts[row : row + 2].tolist())
            assert_same_bits(got.logits[row], edited, what)
            assert (int(got.argmax_ids[row]), int(got.quantile_ids[row])) == (argmax, quantile), (
                what
            )
            pair = np.array([got.max_logits[row], got.normalizers[row]])
            assert_same_bits(pair, np.array([largest, z], np.float32), what)
            assert_same_bits(got.top_k_ids[top], ids, f"{what} ids")
            assert_same_bits(got.top_k_logits[top], values, f"{what} logits")
            assert_same_bits(got.top_k_weights[top], weights, f"{what} weights")


def quantiles_at_the_ends(factory: EmulatedKernelFactory) -> None:
    """u = 0, u just below 1, and rows whose weights are mostly +0."""
    launcher, rng, reference = launcher_of(factory), np.random.default_rng(12), native().reference
    width, rows = 2500, 6
    step = step_of(rng, width, rows, [int(Stat.QUANTILE)])
    below_one = np.float32(1) - np.float32(2.0**-24)
    step.quantiles[:] = np.array([0, below_one, 0, below_one, 0.5, below_one], np.float32)
    step.inverse_temperatures[:] = [1, 1, 50, 50, 0, 0]
    step.edit_values[:] = 0
    logits = logits_of(rng, width, rows) * np.float32(30)
    got = read_statistics(launcher.arrays, row_statistics(launcher, logits, width, step))
    none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    for row in range(rows):
        result = reference.statistics(
            logits[row].copy(),
            False,
            True,
            float(step.inverse_temperatures[row]),
            float(step.quantiles[row]),
            *none,
            none[0],
            none[1],
            none[1],
        )
        assert int(got.quantile_ids[row]) == result[3], row


def tokens_of_the_step_before(factory: EmulatedKernelFactory) -> None:
    """Literal ids, argmax and drawn tokens; ids that no row chose become 0."""
    launcher, rng = launcher_of(factory), np.random.default_rng(13)
    vocabulary, none = 1000, np.zeros(0, np.int32)
    before = step_of(rng, vocabulary, 9, [int(Stat.ARGMAX), int(Stat.QUANTILE)])
    argmax, drawn = rng.integers(0, vocabulary, (2, 9)).astype(np.int32)
    argmax[2], argmax[4], drawn[3] = vocabulary, -1, vocabulary + 7
    chosen = np.where(np.arange(9) % 2 == 1, drawn, argmax)
    chosen[[2, 3, 4]] = 0
    for count in (1, 7, 8, 300):
        step = step_of(rng, vocabulary, count, [0])
        step.token_ids[:] = rng.integers(0, vocabulary, count)
        sources = rng.integers(-1, 9, count).astype(np.int32)
        sources[:1] = 3
        step = replace(step, token_sources=sources)
        for sampled in ((argmax.astype(np.float32), drawn), ()):
            found = DeviceStatistics(none, argmax, none, sampled, (), none, vocabulary, before)
            expected = chosen if sampled else np.where(argmax % vocabulary == argmax, argmax, 0)
            literal = np.where(sources < 0, step.token_ids, expected[np.maximum(sources, 0)])
            got = launcher.arrays.numpy(take_tokens(launcher, step, found, vocabulary))
            assert got[:count].tolist() == literal.tolist()


CASES = (statistics, quantiles_at_the_ends, tokens_of_the_step_before)
