"""The models that are put under load."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.stress.request_pool import Profile

PROFILES: Final = {
    "real": Profile(
        name="real",
        vocab_size=49152,
        max_prompt_words=150,
        max_prompt_ids=300,
        max_tokens=96,
        pace_seconds=4.0,
    ),
    # The real model with requests that are short enough for every test run.
    "brief": Profile(
        name="brief",
        vocab_size=49152,
        max_prompt_words=40,
        max_prompt_ids=100,
        max_tokens=24,
        pace_seconds=1.0,
    ),
    "tiny": Profile(
        name="tiny",
        vocab_size=400,  # a little more than its tokenizer knows
        max_prompt_words=40,
        max_prompt_ids=200,
        max_tokens=120,
        pace_seconds=0.5,
    ),
}


def model_path(profile: Profile, folder: Path) -> Path:
    """Return the profile's model; a tiny one is made in `folder`."""
    # Imported here: load generators need neither MLX nor the executor's packages.
    from tests.support.embedded_model import embedded_model_path
    from tests.support.tiny_model import Storage, TinyShape, write_directory

    if profile.name != "tiny":
        return embedded_model_path()
    path = folder / "tiny"
    # 576 bytes of cache a token: in the smallest pool, 1 MiB, some 12 requests fit.
    shape = TinyShape(
        vocab_size=profile.vocab_size, context_length=512, num_layers=3, num_kv_heads=3
    )
    write_directory(path, shape, Storage(bits=4))
    return path
