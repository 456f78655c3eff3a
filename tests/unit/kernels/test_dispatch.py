"""Which unit is chosen, and what happens when one is wrong."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from isobatch_kernels import dispatch, self_test
from isobatch_kernels.self_test import first_difference, tiny_program
from tests.support.kernel_programs import UNITS, native

SIZES = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests must not decide."""
    monkeypatch.delenv(dispatch.UNIT_VARIABLE, raising=False)


def test_the_fastest_unit_is_chosen() -> None:
    """VNNI before AMX before AVX2 before scalar."""
    assert dispatch.choose_unit() == UNITS[-1]
    assert dispatch.available_units() == (*reversed(UNITS), "reference")


@pytest.mark.parametrize("activation_bits", [12, 8])
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_passes_the_self_test(unit: str, activation_bits: int) -> None:
    """In both classes."""
    assert first_difference(unit, activation_bits) is None


def test_the_self_test_sees_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose layer differs in the last bit of one output is found."""
    real = native.LinearLayer.forward

    def wrong(layer: object, x: object, y: np.ndarray, finite: object) -> None:
        real(layer, x, y, finite)
        if y.shape == (9, 33):
            y.view(np.uint32)[0, 32] ^= 1

    monkeypatch.setattr(native.LinearLayer, "forward", wrong)
    difference = first_difference("scalar")
    assert difference is not None
    assert difference.endswith("to 33")


def test_a_wrong_unit_is_passed_over_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next slower one is taken; a warning names both reasons."""
    monkeypatch.setattr(
        self_test, "first_difference", lambda unit, bits: None if unit == "scalar" else "row 3"
    )
    with caplog.at_level(logging.WARNING):
        assert dispatch.choose_unit() == "scalar"
    assert len(caplog.records) == len(UNITS) - 1
    assert all("row 3" in r.getMessage() for r in caplog.records)


def test_no_right_unit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong bits are never served."""
    monkeypatch.setattr(self_test, "first_difference", lambda *_: "everything")
    with pytest.raises(RuntimeError, match="must equal the reference"):
        dispatch.choose_unit()


def test_the_environment_names_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in for auto and is checked like an argument."""
    monkeypatch.setenv(dispatch.UNIT_VARIABLE, "scalar")
    assert dispatch.choose_unit() == "scalar"
    assert dispatch.choose_unit("reference") == "reference"
    monkeypatch.setenv(dispatch.UNIT_VARIABLE, "abacus")
    with pytest.raises(ValueError, match=r"unit must be one of auto, .*, got 'abacus'"):
        dispatch.choose_unit()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"backend": "abacus"}, "backend must be one of"),
        ({"block_size": 32}, "block_size must be 16, got 32"),
        ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be positive"),
        ({"num_threads": -1}, "num_threads must not be negative"),
        ({"backend": "metal", "unit": "scalar"}, "unit must be auto for backend metal"),
        ({"backend": "reference", "unit": "scalar"}, "unit must be auto for backend reference"),
    ],
)
def test_arguments_are_checked(change: dict[str, object], rule: str) -> None:
    """Before weights are repacked."""
    program = tiny_program(np.random.default_rng(1))
    with pytest.raises(ValueError, match=rule):
        dispatch.create_backend(program, **(SIZES | change))  # type: ignore[arg-type]


def test_a_backend_says_what_it_is() -> None:
    """Unit, threads and the digest of its RoPE table."""
    program = tiny_program(np.random.default_rng(1))
    backend = dispatch.create_backend(
        program, num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8, unit="scalar"
    )
    assert backend.unit == "scalar"
    assert int(backend.rope_digest, 16) >= 0
    assert len(backend.rope_digest) == 8
    assert native.usable_cpus() >= 1
