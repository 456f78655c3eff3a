"""Files that the training recipe writes, read back by itself and by the product's loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor_service.models.gguf import load_gguf, read_gguf_header
from isobatch_kernels.program import QuantizedWeight
from tests.support import tiny_gguf
from tests.support.tiny_model import TinyShape
from training.gguf_file import Float32, halves, interleaved, q4_1_blocks, read_gguf, write_gguf

SHAPE = TinyShape(hidden_size=96, intermediate_size=160)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))


def random_rows(rows: int, columns: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def loaded_values(weight: QuantizedWeight) -> Float32:
    """Every value of a packed matrix of 4 bits, by MLX's layout."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    q = (np.asarray(weight.packed, np.uint32)[:, :, None] >> shifts) & 15
    q = q.reshape(weight.num_outputs, -1, weight.group_size).astype(np.float32)
    assert weight.biases is not None
    scales, biases = (
        each.astype(np.float32)[:, :, None] for each in (weight.scales, weight.biases)
    )
    return np.asarray((scales * q + biases).reshape(weight.num_outputs, -1), np.float32)


def student() -> tuple[dict[str, object], dict[str, Float32]]:
    """A tiny model's metadata and tensors, under GGUF names."""
    metadata = tiny_gguf.gguf_metadata(SHAPE)
    hidden, inner, key = SHAPE.hidden_size, SHAPE.intermediate_size, 2 * SHAPE.head_dim
    query = SHAPE.num_heads * SHAPE.head_dim
    tensors = {
        "token_embd.weight": random_rows(SHAPE.vocab_size, hidden),
        "output_norm.weight": random_rows(1, hidden)[0],
    }
    for layer in range(SHAPE.num_layers):
        sizes = {
            "attn_q": (query, hidden), "attn_k": (key, hidden), "attn_v": (key, hidden),
            "attn_output": (hidden, query), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }  # fmt: skip
        for index, (name, size) in enumerate(sizes.items()):
            tensors[f"blk.{layer}.{name}.weight"] = random_rows(*size, seed=10 * layer + index)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = random_rows(1, hidden, seed=layer)[0]
    return metadata, tensors


def test_what_is_written_is_what_the_executor_loads(tmp_path: Path) -> None:
    metadata, tensors = student()
    path = tmp_path / "student.gguf"
    stored = write_gguf(path, metadata, tensors)
    checkpoint = load_gguf(path, read_gguf_header(path))
    assert checkpoint.config.num_layers == SHAPE.num_layers
    assert checkpoint.config.tied_embeddings
    names = {"embed": "token_embd.weight"}
    names |= {f"layers.1.{part}": f"blk.1.attn_{part}.weight" for part in "qkv"}
    names |= {f"layers.0.{part}": f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down")}
    for ours, theirs in names.items():
        weight = checkpoint.weights[ours]
        assert isinstance(weight, QuantizedWeight)
        assert (loaded_values(weight) == stored[theirs]).all(), ours
    assert (checkpoint.vectors["norm"] == tensors["output_norm.weight"]).all()


def test_a_written_file_is_read_back_with_its_metadata(tmp_path: Path) -> None:
    metadata, tensors = student()
    stored = write_gguf(tmp_path / "student.gguf", metadata, tensors)
    header, values = read_gguf(tmp_path / "student.gguf")
    assert header.metadata.keys() == metadata.keys()
    assert header.metadata["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert values.keys() == stored.keys()
    assert all((values[name] == stored[name]).all() for name in stored)


def test_rounding_again_changes_nothing(tmp_path: Path) -> None:
    """Training goes on from rounded weights, and what it rounds last is what is stored."""
    _, tensors = student()
    once = write_gguf(tmp_path / "once.gguf", {}, tensors)
    twice = write_gguf(tmp_path / "twice.gguf", {}, once)
    differences = [np.abs(once[name] - twice[name]).max() for name in once]
    assert max(differences) <= 1e-3  # an end of a block may move by a rounding of fp16


def test_a_value_moves_by_half_a_step_at_most(tmp_path: Path) -> None:
    values = random_rows(7, 64)
    stored = write_gguf(tmp_path / "m.gguf", {}, {"m": values})["m"]
    blocks = values.reshape(-1, 32)
    step = (blocks.max(1) - blocks.min(1)) / 15
    moved = np.abs(stored - values).reshape(-1, 32).max(1)
    assert (moved <= 0.52 * step).all()
    assert moved.max() > 0.4 * step.max()


def test_a_block_of_one_value_is_kept() -> None:
    blocks = q4_1_blocks(np.full((1, 32), 0.25, np.float32))
    assert blocks["d"].tolist() == [0.0]
    assert blocks["m"].tolist() == [0.25]
    assert not blocks["q"].any()


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_teacher_is_read_as_its_blocks_say(tmp_path: Path, kind: str) -> None:
    raw, exact = tiny_gguf.encode(random_rows(6, 64), kind)
    path = tmp_path / "teacher.gguf"
    path.write_bytes(tiny_gguf.gguf_bytes({}, {"m": (kind, (6, 64), raw)}))
    assert (read_gguf(path)[1]["m"] == exact).all()


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    raw, _ = tiny_gguf.encode(random_rows(1, 32), "F16")
    path = tmp_path / "teacher.gguf"
    path.write_bytes(tiny_gguf.gguf_bytes({}, {"m": ("F16", (1, 32), raw)}))
    with pytest.raises(ValueError, match="got F16"):
        read_gguf(path)


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multiples of 32, got \(2, 40\)"):
        write_gguf(tmp_path / "m.gguf", {}, {"m": random_rows(2, 40)})


def test_rotary_pairs_are_reordered_and_back() -> None:
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert halves(rows, 4)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert (interleaved(halves(rows, 4), 4) == rows).all()
    assert (halves(interleaved(rows, 8), 8) == rows).all()
