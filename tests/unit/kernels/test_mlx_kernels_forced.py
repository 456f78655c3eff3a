"""The float policies in MLX's operations, as on a GPU, with MLX's CPU device in its place.

There MLX has one kernel, so all policies give equal numbers; what can be seen is which rows each
of its calls gets.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from isobatch_kernels import dispatch, mlx_device  # noqa: E402
from isobatch_kernels.float_program import apply_policy  # noqa: E402
from isobatch_kernels.kernel_policy import ROW_POLICIES, KernelPolicy, minds_company  # noqa: E402
from isobatch_kernels.program import Program  # noqa: E402
from isobatch_kernels.step import StepOutput  # noqa: E402
from tests.support.kernel_programs import UNITS, Row, bits, make_step  # noqa: E402
from tests.unit.kernels.test_mlx_policy import SIZES, mlx_program, some_tokens  # noqa: E402

ENOUGH = 33  # rows that make MLX's GPUs take a matrix-matrix kernel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, on which MLX computes with its CPU device."""
    monkeypatch.setattr(dispatch, "mlx_has_device", lambda device: device == "cuda")
    monkeypatch.setattr(mlx_device, "use_device", lambda _: mx.set_default_device(mx.cpu))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of MLX's quantised product, in order."""
    seen: list[int] = []
    product = mx.quantized_matmul

    def counted(x: Any, *rest: Any, **options: Any) -> Any:
        seen.append(x.shape[0])
        return product(x, *rest, **options)

    monkeypatch.setattr(mx, "quantized_matmul", counted)
    return seen


def _run(program: Program, policy: str, num_rows: int, backend: str = "cuda") -> StepOutput:
    made = dispatch.create_backend(
        apply_policy(program, KernelPolicy(policy)), backend=backend, **SIZES
    )
    rows = [Row(some_tokens(1, seed), 0, (seed,)) for seed in range(num_rows)]
    return made.run(make_step(rows))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("policy", "num_rows", "rows_of_calls", "path"),
    [
        ("gemv", 3, 1, "gemv"),
        ("gemm", 3, ENOUGH, "gemm"),
        ("gemm", 1, ENOUGH, "gemm"),
        ("threshold", 4, 1, "gemv"),
        ("threshold", 5, ENOUGH, "gemm"),
        ("mlx", 3, 3, "other"),
    ],
)
def test_calls_get_the_rows_that_force_a_kernel(
    policy: str, num_rows: int, rows_of_calls: int, path: str, calls: list[int]
) -> None:
    program = mlx_program()
    output = _run(program, policy, num_rows)
    assert set(calls) == {rows_of_calls}
    # Ten quantised matrices, called for each row or once for all.
    assert len(calls) == 10 * (num_rows if path == "gemv" else 1)
    linear = [each for each in output.paths if each.op == "linear"]
    assert {(each.path, each.unit) for each in linear} == {(path, "mlx")}
    # One kernel on the CPU: what was cut into rows or filled up is what it was.
    plain = _run(program, "mlx", num_rows, backend="cpu")
    assert np.array_equal(bits(output.logits), bits(plain.logits))


@pytest.mark.usefixtures("gpu")
def test_many_rows_are_not_filled_up(calls: list[int]) -> None:
    made = dispatch.create_backend(
        apply_policy(mlx_program(), KernelPolicy("gemm")), backend="cuda", **SIZES
    )
    made.run(make_step([Row(some_tokens(40), 0, (0, 1, 2), wanted=())]))
    assert set(calls) == {40}


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_device_and_cpu_the_native_kernels() -> None:
    details = {}
    for name in ROW_POLICIES:
        floats = apply_policy(mlx_program(), KernelPolicy(name))
        for backend in ("auto", "cuda", "cpu"):
            made: Any = dispatch.create_backend(floats, backend=backend, **SIZES)
            details[name, backend] = (made.unit, getattr(made, "class_detail", ""))
        made = dispatch.create_backend(floats, unit=UNITS[0], **SIZES)
        assert made.unit == UNITS[0]
    for (name, backend), (unit, detail) in details.items():
        if backend == "cpu":
            assert (unit in UNITS, detail) == (True, "")
        else:
            assert (unit, detail) == ("mlx", f"mlx-{version('mlx')}-cpu"), name


@pytest.mark.usefixtures("gpu")
def test_auto_falls_back_where_mlx_lacks_the_format(caplog: pytest.LogCaptureFixture) -> None:
    program = mlx_program(group_size=16)
    floats = apply_policy(program, KernelPolicy("gemm"))
    made = dispatch.create_backend(floats, **SIZES)
    assert made.unit in UNITS
    assert "cuda cannot be used" in caplog.text
    with pytest.raises(ValueError, match="got 4 bits in groups of 16"):
        dispatch.create_backend(floats, backend="cuda", **SIZES)


@pytest.mark.parametrize("policy", ["mlx", *ROW_POLICIES])
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_device_that_is_not_here_is_refused(policy: str, device: str) -> None:
    floats = apply_policy(mlx_program(), KernelPolicy(policy))
    with pytest.raises(RuntimeError, match=rf"policy {policy} needs MLX with its {device}"):
        dispatch.create_backend(floats, backend=device, **SIZES)


def test_which_policies_mind_company() -> None:
    names = ("exact", "mlx", *ROW_POLICIES)
    assert [each for each in names if minds_company(each, "cpu")] == ["mlx", "threshold"]
    assert [each for each in names if minds_company(each, "mlx")] == ["mlx", "threshold", "gemm"]
