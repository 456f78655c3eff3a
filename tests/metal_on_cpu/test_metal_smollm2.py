"""A real model under the harness: a few steps of SmolLM2 give the CPU backend's bytes."""

from __future__ import annotations

import numpy as np

from executor_service.models.load import load_model
from executor_service.models.registry import ModelLocation
from tests.metal_on_cpu.backends import Pair
from tests.support.embedded_model import embedded_model_path
from tests.support.kernel_programs import Row, make_step


def test_steps_of_smollm2() -> None:
    """A short prefill beside another sequence, then decode steps of one row and of two."""
    program = load_model(ModelLocation(embedded_model_path(), "smollm2")).program
    pair = Pair(program, num_blocks=8, max_num_batched_tokens=32)
    prompt = [1, 4093, 198, 3110]
    got, _ = pair.run(make_step([Row(prompt, 0, (0,)), Row([7], 0, (1,))]))
    following = [int(t) for t in got.argmax_ids]
    pair.run(make_step([Row(following[:1], 4, (0,)), Row(following[1:], 1, (1,))]))
    got, _ = pair.run(make_step([Row([5], 5, (0,))]))
    pair.assert_same_cache()
    assert np.isfinite(got.logits).all()
