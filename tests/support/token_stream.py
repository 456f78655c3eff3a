"""One request on a bare backend: prefill, then token after token, greedy or drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isobatch_kernels.step import Backend, Stat, StepInput

BLOCK_SIZE = 16


def generate(
    backend: Backend,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int | None = None,
    inverse_temperature: float = 1.0,
) -> list[int]:
    """The next `count` tokens: the argmax, or with a seed the token at a drawn quantile.

    Uses blocks 0, 1, 2, .. of the cache.
    """
    rng = np.random.default_rng(seed)
    asked = Stat.ARGMAX if seed is None else Stat.QUANTILE
    tokens, out = list(prompt), []
    position = 0
    table = np.arange(-(-(len(prompt) + count) // BLOCK_SIZE), dtype=np.int32)[None]
    for _ in range(count):
        step = StepInput(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(position, position + len(tokens), dtype=np.int32),
            query_start_loc=np.array([0, len(tokens)], np.int32),
            block_tables=table,
            wanted=np.array([len(tokens) - 1], np.int32),
            statistics=np.array([asked], np.uint32),
            top_k=np.zeros(1, np.int32),
            inverse_temperatures=np.array([inverse_temperature], np.float32),
            quantiles=rng.random(1).astype(np.float32),
            edit_starts=np.zeros(2, np.int32),
            edit_ids=np.zeros(0, np.int32),
            edit_values=np.zeros(0, np.float32),
        )
        output = backend.run(step)
        position += len(tokens)
        ids = output.argmax_ids if seed is None else output.quantile_ids
        tokens = [int(ids[0])]
        out += tokens
    return out
