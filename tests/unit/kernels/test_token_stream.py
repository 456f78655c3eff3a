"""The helper that writes text on a bare backend: units agree, seeds matter."""

import numpy as np

from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.self_test import tiny_program
from tests.support.token_stream import generate


def test_units_write_the_same_text() -> None:
    """Greedy and drawn; two seeds give two texts."""
    program = tiny_program(np.random.default_rng(1))
    texts = []
    for unit in ("scalar", "reference"):
        backend = CpuBackend(program, CpuLimits(8, 16, 1, 40, num_threads=1), unit=unit)
        texts.append(
            [
                generate(backend, range(30), 12, seed=seed, inverse_temperature=0.01)
                for seed in (None, 1, 2)
            ]
        )
        backend.close()
    assert texts[0] == texts[1]
    greedy, first, second = texts[0]
    assert len(greedy) == 12
    assert first != second
