"""A neighbour's prompt pushes one known step over the threshold, and explain names it.

tests/support/planted_neighbour.py plants it. Under policy `threshold` this step alone takes other
kernels for the subject's row, and on a GPU under `mlx` too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isobatch_kernels.dispatch import device_is_available
from tests.support.planted_neighbour import (
    NEIGHBOUR,
    NUM_SHORT_TOKENS,
    NUM_TOKENS,
    SHAPE,
    SUBJECT,
    Told,
    explain_planted,
)
from tests.support.tiny_model import Storage, write_directory

STEP_TOKENS = len(NEIGHBOUR) + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    write_directory(folder, SHAPE, Storage(4))
    return folder


def _assert_named(told: Told) -> None:
    """The step, the block and the neighbour, as the test knows them."""
    assert told.num_step_tokens == STEP_TOKENS
    assert told.position >= len(SUBJECT) + NUM_SHORT_TOKENS - 2
    assert told.exit_codes == (1, 1, 1), told.words
    found, block = told.data, told.position // 16
    assert (found["first_kv_position"], found["first_kv_block"]) == (told.position, block)
    mine, alone = found["written_by"]
    assert (mine["step_id"], mine["num_step_tokens"]) == (told.step_id, STEP_TOKENS)
    assert [each["num_tokens"] for each in mine["neighbours"]] == [len(NEIGHBOUR)]
    assert (alone["num_step_tokens"], alone["num_neighbours"]) == (1, 0)
    assert found["first_logits"]["index"] == told.index
    assert f"block {block} (positions" in told.words
    assert f"written by step {told.step_id}, which had 31 rows" in told.words


def _assert_equal(told: Told) -> None:
    assert told.num_step_tokens == STEP_TOKENS
    assert told.exit_codes == (0, 0, 0), told.words
    positions = len(SUBJECT) + NUM_TOKENS - 1
    assert f"Equal: 40 tokens, 40 rows of logits, {positions} positions" in told.words
    assert "Positions that other kernel paths wrote" in told.words


def test_explain_names_the_step_the_block_and_the_neighbour(model: Path, tmp_path: Path) -> None:
    told = explain_planted(model, "threshold", tmp_path, "cpu")
    _assert_named(told)
    assert told.data["numeric_classes"][0].startswith("F1-threshold4-a16f")
    assert "linear: A ran gemm" in told.words
    assert f"step {told.step_id} of A had 31 rows, 30 of them of one neighbour" in told.words


def test_under_the_exact_policy_the_same_neighbour_changes_nothing(
    model: Path, tmp_path: Path
) -> None:
    _assert_equal(explain_planted(model, "exact", tmp_path, "cpu"))


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["mlx", "threshold", "exact"])
def test_on_a_gpu(policy: str, model: Path, tmp_path: Path) -> None:
    if not device_is_available("cuda"):
        pytest.skip("no NVIDIA GPU with MLX for CUDA")
    told = explain_planted(model, policy, tmp_path, "cuda")
    if policy == "exact":
        _assert_equal(told)
        return
    _assert_named(told)
    assert "-cuda-" in told.data["numeric_classes"][0]
    if policy == "mlx":  # MLX does not tell its kernels, so the rows are named
        assert "the number of rows (31 in A, 1 in B)" in told.words
