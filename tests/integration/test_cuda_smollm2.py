"""SmolLM2 on an NVIDIA GPU writes what it writes on the CPU: 2,000 tokens, greedy and drawn."""

import pytest

from executor_service.models.load import load_model
from executor_service.models.registry import ModelLocation
from isobatch_kernels.cuda.create import cuda_is_available
from isobatch_kernels.dispatch import create_backend
from tests.support.embedded_model import embedded_model_path
from tests.support.token_stream import generate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not cuda_is_available(), reason="no NVIDIA GPU with cuda-bindings"),
]


@pytest.mark.parametrize("seed", [None, 7])
def test_the_same_text_on_both(seed: int | None) -> None:
    """1,000 tokens each way, past three chunks of attention."""
    program = load_model(ModelLocation(embedded_model_path(), "smollm2")).program
    prompt = list(range(1000, 1040))
    texts = []
    for name in ("cpu", "cuda"):
        backend = create_backend(
            program, backend=name, num_blocks=70, max_num_seqs=1, max_num_batched_tokens=64
        )
        texts.append(generate(backend, prompt, 1000, seed=seed))
        backend.close()
    assert texts[0] == texts[1]
