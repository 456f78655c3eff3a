"""Whole tiny models on the real backend against an independent fp32 decoder.

The executor rounds activations to 12 bits and keys and values to fp16, so logits differ by
rounding. Bounds are in units of the logits' standard deviation. Measured: at most 0.0064 for
quantised and fp16 matrices, 0.02 for bfloat16 ones, whose activations keep 8 bits of mantissa.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from executor_service.models.config_json import llama3_frequency_factors
from executor_service.models.load import LoadedModel, load_model
from executor_service.models.registry import ModelLocation
from isobatch_kernels.step import StepInput
from tests.support import fp32_decoder
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import Storage, TinyShape, write_directory

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")
dispatch = pytest.importorskip("isobatch_kernels.dispatch")

Float32 = npt.NDArray[np.float32]

BOUND = 0.012
BFLOAT16_BOUND = 0.04
LENGTH = 40

LLAMA = TinyShape()
UNTIED = TinyShape(tied=False, num_layers=1)
QWEN2 = TinyShape(
    "qwen2",
    hidden_size=128,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=97,
    tied=False,
)


def _tokens(shape: TinyShape) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, shape.vocab_size, LENGTH)]


@functools.cache
def _unit() -> str:
    return str(dispatch.choose_unit())


def _run(path: Path, tokens: list[int]) -> tuple[LoadedModel, Float32]:
    """Logits of every position, in one prefill step."""
    model = load_model(ModelLocation(path, "tiny"))
    backend = dispatch.create_backend(
        model.program,
        num_blocks=4,
        max_num_seqs=1,
        max_num_batched_tokens=LENGTH,
        num_threads=1,
        unit=_unit(),
    )
    count = len(tokens)
    backend.zero_blocks(np.arange(4, dtype=np.int32))
    output = backend.run(
        StepInput(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(count, dtype=np.int32),
            query_start_loc=np.array([0, count], np.int32),
            block_tables=np.arange(4, dtype=np.int32)[None],
            wanted=np.arange(count, dtype=np.int32),
            statistics=np.ones(count, np.uint32),
            top_k=np.zeros(count, np.int32),
            inverse_temperatures=np.ones(count, np.float32),
            quantiles=np.zeros(count, np.float32),
            edit_starts=np.zeros(count + 1, np.int32),
            edit_ids=np.zeros(0, np.int32),
            edit_values=np.zeros(0, np.float32),
        )
    )
    logits = np.array(output.logits)
    backend.close()
    return model, logits


def _assert_close(got: Float32, expected: Float32, bound: float = BOUND) -> None:
    unit = expected.std()
    error = np.abs(got - expected).max(axis=1) / unit
    assert error.max() <= bound
    ranked = np.sort(expected, axis=1)
    clear = (ranked[:, -1] - ranked[:, -2]) / unit > 2 * bound
    assert clear.sum() > LENGTH // 2
    assert (got.argmax(axis=1) == expected.argmax(axis=1))[clear].all()


@pytest.mark.parametrize(
    ("shape", "storage"),
    [
        (LLAMA, Storage(4, 32)),
        (LLAMA, Storage(8, 32)),
        (LLAMA, Storage(0, dtype="float16")),
        (LLAMA, Storage(0, dtype="float32")),
        (UNTIED, Storage(4, 32, "float32", (("lm_head", 0), ("down_proj", 0)))),
        (QWEN2, Storage(4, 64)),
        (QWEN2, Storage(8, 64, "float32")),
        (QWEN2, Storage(4, 32, "bfloat16", (("v_proj", 8), ("down_proj", 6)))),
    ],
    ids=str,
)
def test_directories_agree_with_the_fp32_decoder(
    tmp_path: Path, shape: TinyShape, storage: Storage
) -> None:
    weights = write_directory(tmp_path / "tiny", shape, storage)
    model, got = _run(tmp_path / "tiny", _tokens(shape))
    assert model.config.architecture == shape.architecture
    _assert_close(got, fp32_decoder.logits(shape, weights, _tokens(shape)))


def test_bfloat16_matrices_agree_with_the_fp32_decoder(tmp_path: Path) -> None:
    weights = write_directory(tmp_path / "tiny", LLAMA, Storage(0, dtype="bfloat16"))
    _, got = _run(tmp_path / "tiny", _tokens(LLAMA))
    _assert_close(got, fp32_decoder.logits(LLAMA, weights, _tokens(LLAMA)), BFLOAT16_BOUND)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32", "BF16"])
def test_gguf_files_agree_with_the_fp32_decoder(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    """Llama files keep rotary pairs side by side, Qwen2 files in halves; logits do not care."""
    shape = TinyShape(architecture)
    weights = write_gguf(tmp_path / "tiny.gguf", shape, kind)
    _, got = _run(tmp_path / "tiny.gguf", _tokens(shape))
    _assert_close(got, fp32_decoder.logits(shape, weights, _tokens(shape)))


def test_gguf_tensors_may_differ_in_type(tmp_path: Path) -> None:
    kinds = {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "F16"}
    weights = write_gguf(tmp_path / "tiny.gguf", LLAMA, "Q4_1", kinds=kinds)
    _, got = _run(tmp_path / "tiny.gguf", _tokens(LLAMA))
    _assert_close(got, fp32_decoder.logits(LLAMA, weights, _tokens(LLAMA)))


def test_frequency_factors_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    weights = write_gguf(tmp_path / "tiny.gguf", LLAMA, "F16", factors=factors)
    _, got = _run(tmp_path / "tiny.gguf", _tokens(LLAMA))
    _assert_close(got, fp32_decoder.logits(LLAMA, weights, _tokens(LLAMA), factors))
    with pytest.raises(AssertionError):
        _assert_close(got, fp32_decoder.logits(LLAMA, weights, _tokens(LLAMA)))


def test_llama3_scaling_of_a_directory_is_used(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    shape = TinyShape(rope_scaling=scaling)
    weights = write_directory(tmp_path / "tiny", shape, Storage())
    _, got = _run(tmp_path / "tiny", _tokens(shape))
    factors = llama3_frequency_factors(
        shape.rope_theta, shape.head_dim, factor=8.0, low=1.0, high=4.0, original_context=64
    )
    assert 1.0 < factors[1] < 8.0  # one that is blended
    _assert_close(got, fp32_decoder.logits(shape, weights, _tokens(shape), factors))


def test_linear_scaling_of_a_directory_is_used(tmp_path: Path) -> None:
    shape = TinyShape(rope_scaling={"type": "linear", "factor": 4.0})
    weights = write_directory(tmp_path / "tiny", shape, Storage())
    _, got = _run(tmp_path / "tiny", _tokens(shape))
    expected = fp32_decoder.logits(shape, weights, _tokens(shape), position_scale=0.25)
    _assert_close(got, expected)


def test_sliding_windows_of_qwen2_are_used(tmp_path: Path) -> None:
    shape = replace(QWEN2, window=7)
    weights = write_directory(tmp_path / "tiny", shape, Storage())
    _, got = _run(tmp_path / "tiny", _tokens(shape))
    _assert_close(got, fp32_decoder.logits(shape, weights, _tokens(shape), window=7))


def test_agrees_with_transformers(tmp_path: Path) -> None:
    """The widely used implementation on the same directory, where it is installed."""
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    for shape in (LLAMA, QWEN2):
        path = tmp_path / shape.architecture
        write_directory(path, shape, Storage(0, dtype="float16"))
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected = reference(torch.tensor([_tokens(shape)])).logits[0].numpy()
        _, got = _run(path, _tokens(shape))
        _assert_close(got, expected)
