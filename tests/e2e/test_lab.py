"""`isobatch lab article --quick` with real processes and a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isobatch_kernels.dispatch import device_is_available
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")


def _lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scheduler_service.cli", "lab", "article", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def test_a_quick_report_says_where_results_change(tmp_path: Path) -> None:
    """The threshold policy's row changes with its fifth neighbour, and nobody else's does."""
    write_directory(tmp_path / "tiny", TinyShape(vocab_size=vocab_size()), Storage(4))
    page, values = tmp_path / "report.html", tmp_path / "report.json"
    done = _lab(
        "--quick", "--backend", "cpu", "--model", str(tmp_path / "tiny"),
        "--threads", "1", "--kv-memory-mb", "1",
        "--html", str(page), "--json", str(values),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Decoding speed by concurrent sequences" in done.stdout
    assert "<svg" in page.read_text("utf-8")
    report = json.loads(values.read_text("utf-8"))
    assert report["switch"]["differs_from_rows"] == {
        "gemv": None, "gemm": None, "threshold": 5, "mlx": None, "exact": None
    }  # fmt: skip
    assert report["numeric_classes"]["mlx"].startswith("F1-mlx-")
    assert report["switch"]["paths"]["threshold"] == ["gemv"] * 4 + ["gemm"]
    for case in report["verify_cases"]:
        differs = case["policy"] == "threshold"
        assert (case["verify_logits_differ"] > 0) == differs, case
        assert (case["kv_positions_differ"] > 0) == differs, case
        # A small model may round the difference away again.
        assert case["later_logits_differ"] == 0 or differs, case
    for text in report["divergences"]:
        assert (text["first_digest"] is not None) == (text["policy"] == "threshold"), text
    for drafts in report["acceptances"]:
        if drafts["policy"] != "threshold":
            assert drafts["texts_differ"] == 0
            for name in ("proposed", "accepted"):
                assert drafts[f"{name}_alone"] == drafts[f"{name}_together"], drafts
    assert all(
        len(speeds) == 3 and min(speeds) > 0
        for speeds in report["speed"]["tokens_per_second"].values()
    )


def test_a_device_that_is_not_here_is_named() -> None:
    if device_is_available("cuda"):
        pytest.skip("this machine has a CUDA device")
    done = _lab("--quick", "--backend", "cuda")
    assert done.returncode == 78, done.stderr
    assert "backend cuda needs an NVIDIA GPU and the package cuda-bindings" in done.stderr


def test_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    done = _lab("--quick", "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 78, done.stderr
    assert "nowhere" in done.stderr
