"""The profile picks kernels and tiles by rows and shape, from times alone; no bit depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from executor_service.engine.profile_tune import tune
from executor_service.engine.step_request import Limits
from isobatch_kernels.metal.linear_profile import Choice, LinearProfile
from isobatch_kernels.metal.measure import layers_by_shape
from isobatch_kernels.metal_backend import MetalBackend, MetalLimits
from isobatch_kernels.self_test import tiny_program
from isobatch_kernels.tuning import Proposing
from tests.metal_on_cpu.backends import Pair, rope_table
from tests.metal_on_cpu.harness.arrays import NumpyArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.support.kernel_programs import Row, make_step

PROGRAM = tiny_program(np.random.default_rng(7))
QKV, OUT, GATE_UP, DOWN, HEAD = "192x96/4", "96x96/4", "320x96/4", "96x160/4", "1100x96/8"
TILES = {"gemv": "R", "gemv_multi": "V", "gemm": "BM"}


class FakeDevice:
    """Kernels that compute nothing and take a time by name, tile and shape."""

    def __init__(self, slow: dict[tuple[str, int], int], odd: dict[tuple[str, str, int], int]):
        self.now = 0
        self._slow, self._odd = slow, odd

    def clock(self) -> int:
        return self.now

    def _cost(self, name: str, template: Any, inputs: Sequence[Any]) -> int:
        values, sizes = dict(template or ()), inputs[-1]
        if name not in TILES:
            return 5
        shape, tile = f"{sizes[1]}x{sizes[0]}/{values['BITS']}", values[TILES[name]]
        if name == "gemv_multi" and values["R"] > 1:
            name = "gemv_wide"
        return self._odd.get((shape, name, tile), self._slow.get((name, tile), 100))

    def __call__(self, *, name: str, **_: Any) -> Any:
        def call(
            *,
            inputs: Sequence[Any],
            template: Any,
            output_shapes: Sequence[Any],
            output_dtypes: Sequence[Any],
            **_: Any,
        ) -> list[Any]:
            self.now += self._cost(name.removeprefix("isobatch_"), template, inputs)
            return [np.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    def backend(self) -> MetalBackend:
        return MetalBackend(
            PROGRAM,
            MetalLimits(64, 16, 64, 640),
            kernel_factory=self,
            arrays=NumpyArrays(),
            rope_table=rope_table(PROGRAM),
        )


class Steps:
    """Decode steps on a backend, as the executor's measurement runs them."""

    def __init__(self, backend: MetalBackend) -> None:
        self._backend = backend

    def num_missing(self, _: Any) -> int:
        return 0

    def take(self, _: Any) -> bool:
        return True

    def run(self, shape: Any) -> None:
        rows = [Row([1], 0, (i,)) for i in range(shape.num_rows)]
        if shape.num_rows == 1:
            rows = [Row([1] * shape.num_tokens, 0, tuple(range(8)))]
        self._backend.run(make_step(rows))


def test_the_model_s_shapes() -> None:
    """Merged matrices count as one; layers of a shape take turns."""
    shapes = layers_by_shape(FakeDevice({}, {}).backend()._model)
    assert {name: len(found) for name, found in shapes.items()} == {
        **dict.fromkeys((QKV, OUT, GATE_UP, DOWN), 2),
        HEAD: 1,
    }


def test_each_shape_gets_what_is_fastest_for_it() -> None:
    """By rows and shape; nothing where the default is as fast."""
    device = FakeDevice(
        {("gemv_multi", 6): 90, ("gemm", 32): 120},
        {
            **{(HEAD, "gemv_multi", tile): 30 for tile in (3, 4)},
            (DOWN, "gemm", 32): 40,
            (OUT, "gemv", 2): 60,
        },
    )
    backend = device.backend()
    assert isinstance(backend, Proposing)
    assert backend.propose(1, device.clock) == f"gemv:1;{OUT}=gemv:2"
    assert backend.propose(2, device.clock) == "gemv_multi:2"
    assert backend.propose(6, device.clock) == f"gemv_multi:6;{HEAD}=gemv_multi:3"
    assert backend.propose(8, device.clock) == (
        f"gemv_multi:8;{DOWN}=gemm:32;{HEAD}=gemv_multi:4"
    )  # fmt: skip


def test_the_executor_takes_the_proposal_where_whole_steps_are_faster() -> None:
    """The measurement of a first start, on the device's own clock."""
    device = FakeDevice(
        {("gemv", 2): 60, ("gemv_wide", 4): 90, ("gemm", 64): 70, ("gemm", 32): 110},
        {(DOWN, "gemv", 1): 50, (DOWN, "gemm", 32): 20},
    )
    backend = device.backend()
    limits = Limits(64, 640, 1100, 640, 8)
    found = tune(backend, Steps(backend), limits, device.clock, budget_ns=10**9)
    own = ";".join(f"{shape}=gemv:2" for shape in (QKV, OUT, GATE_UP, HEAD))
    assert found[1] == f"gemv:1;{own}"
    assert found[2] == "gemv_multi:2"
    assert found[4] == "gemv_wide:4"
    assert found[8] == f"gemv_multi:8;{DOWN}=gemm:32"
    assert found[64] == f"gemm:32;{QKV}=gemm:64;{OUT}=gemm:64;{GATE_UP}=gemm:64;{HEAD}=gemm:64"
    profile = backend.profile.linear
    assert profile.choose(1, DOWN) == ("gemv", 1)
    assert profile.choose(1, QKV) == ("gemv", 2)
    assert profile.choose(7, DOWN) == ("gemm", 32)
    assert profile.choose(7, QKV) == ("gemv_multi", 8)


def test_no_bit_depends_on_the_choice_of_a_shape() -> None:
    """Different kernels in one step, and they are counted as what they are."""
    pair = Pair(PROGRAM, EmulatedKernelFactory())
    pair.metal.choose(
        {
            1: f"gemv:1;{OUT}=gemv:2;{DOWN}=gemv_multi:1",
            8: f"gemv_multi:8;{QKV}=gemv_wide:8;{DOWN}=gemm:32;{HEAD}=gemv_multi:4",
        }
    )
    pair.run(make_step([Row([1, 2, 3, 4, 5], 0, (1,)), Row([7], 0, (2,))]))
    got, _ = pair.run(make_step([Row([9], 5, (1,)), Row([8], 1, (2,))]))
    pair.run(make_step([Row([9], 6, (1,))]))
    pair.assert_same_cache()
    linears = {p.path: (p.dispatches, p.rows) for p in got.paths if p.op == "linear"}
    assert linears == {"gemv_multi": (7, 14), "gemm": (2, 4)}


def test_choices_as_text() -> None:
    for text in ("gemv:1", f"gemv_multi:8;{DOWN}=gemm:32;{QKV}=gemv_multi:4"):
        assert str(Choice.parse(text)) == text
    profile = LinearProfile()
    for text in ("gemm", "gemm:0", "gemv:1", f"gemv_multi:8;{DOWN}", f"gemv_multi:8;{DOWN}=gemm:1"):
        with pytest.raises(ValueError, match=r"\[metal\]"):
            profile.tuned_by({8: text})
    with pytest.raises(ValueError, match=r"\[metal\] a choice must be one of"):
        profile.tuned_by({0: "gemv:1"})
