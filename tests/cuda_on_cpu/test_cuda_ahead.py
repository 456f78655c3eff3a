"""Steps submitted before the last is finished, and graphs of their launches, on the CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda import self_test
from isobatch_kernels.cuda.graphs import Graphs
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.step import Stat, StepInput, StepOutput
from tests.cuda_on_cpu.emulated_device import COMPILER, EmulatedDevice
from tests.cuda_on_cpu.test_cuda_on_cpu import device

__all__ = ["device"]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="no clang++ on this machine"),
]


def _decode(position: int, chosen: bool, quantile: float) -> StepInput:
    """Two rows; the first draws its token and the second takes the argmax."""
    return StepInput(
        token_ids=np.array([0, 0] if chosen else [5, 900], np.int32),
        positions=np.array([position, position], np.int32),
        query_start_loc=np.array([0, 1, 2], np.int32),
        block_tables=np.array([[0, 1], [2, 3]], np.int32),
        wanted=np.array([0, 1], np.int32),
        statistics=np.array([Stat.QUANTILE, Stat.ARGMAX], np.uint32),
        top_k=np.zeros(2, np.int32),
        inverse_temperatures=np.full(2, 0.05, np.float32),
        quantiles=np.full(2, quantile, np.float32),
        edit_starts=np.zeros(3, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
        token_sources=np.array([1, 0] if chosen else [-1, -1], np.int32),
    )


def _equal(a: StepOutput, b: StepOutput) -> None:
    for name in ("logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids"):
        x: Any = np.asarray(getattr(a, name))
        y: Any = np.asarray(getattr(b, name))
        assert x.tobytes() == y.tobytes(), name


def test_a_step_takes_the_tokens_of_the_one_before(device: EmulatedDevice) -> None:
    """The rows swap their tokens at every step, and two steps are always under way."""
    program = tiny_program(np.random.default_rng(1))
    cpu = CpuBackend(program, CpuLimits(4, 16, 2, 8, num_threads=1), unit="reference")
    gpu = CudaBackend(program, CudaLimits(4, 16, 2, 8), device)
    quantiles = np.random.default_rng(2).random(5)
    steps = [_decode(i, i > 0, float(q)) for i, q in enumerate(quantiles)]
    pairs = [(cpu.submit(steps[0]), gpu.submit(steps[0]))]
    for following in [*steps[1:], None]:
        if following is not None:
            pairs.append((cpu.submit(following), gpu.submit(following)))
            with pytest.raises(ValueError, match="at most 2 steps may be pending"):
                gpu.submit(following)
            with pytest.raises(ValueError, match="finished once and in order"):
                pairs[1][1].finish()
        expected, got = (step.finish() for step in pairs.pop(0))
        _equal(expected, got)
    # Of the steps with chosen tokens, two slots launched once each, and recorded once.
    assert (device.graphs, gpu.graphs.replayed) == (2, 2)
    with pytest.raises(ValueError, match="token_sources must be one a token, below 2"):
        gpu.submit(replace(steps[1], token_sources=np.array([2, 0], np.int32)))
    gpu.close()


def test_logits_of_an_old_step_are_refused(device: EmulatedDevice) -> None:
    """They were overwritten, so whatever came would be wrong."""
    program = tiny_program(np.random.default_rng(1))
    gpu = CudaBackend(program, CudaLimits(4, 16, 2, 8), device)
    first, second, third = (gpu.run(_decode(i, False, 0.5)) for i in range(3))
    for step in (second, third):  # at most two are kept
        assert np.asarray(step.logits).max() == step.max_logits.max()
    with pytest.raises(ValueError, match="logits must be read before the next step"):
        np.asarray(first.logits)
    gpu.close()


def test_the_self_test_finds_a_wrong_bit(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And passes where there is none."""
    monkeypatch.setattr(self_test, "ROWS", (3,))
    assert list(self_test.linear_differences(device, [(4, 32, 32)])) == []
    right = self_test.reference_results

    def wrong(*arguments: Any) -> Any:
        y, finite = right(*arguments)
        y.view(np.uint32)[:, 7] ^= 1
        return y, finite

    monkeypatch.setattr(self_test, "reference_results", wrong)
    with pytest.raises(RuntimeError, match="linear layers must equal the contract, got 4 bits"):
        self_test.check(device, [(4, 32, 32)], lambda *_: None)


def test_the_oldest_graph_goes(device: EmulatedDevice) -> None:
    """And comes again when its shape does."""
    graphs, launched = Graphs(device, kept=2), []
    for shape in (1, 1, 2, 2, 3, 3, 1, 3):
        graphs.run(shape, 1, lambda shape=shape: launched.append(shape))  # type: ignore[misc]
    assert launched == [1, 1, 2, 2, 3, 3, 1]
    assert (len(graphs), graphs.recorded, graphs.replayed) == (2, 4, 5)
    graphs.run(3, 2, lambda: launched.append(3))  # an address has changed
    assert (launched[-1], len(launched), len(graphs)) == (3, 8, 1)
    graphs.clear()
    device.close()
