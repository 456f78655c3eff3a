"""The CUDA kernels as text: how files are read, and that a CUDA compiler takes them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from isobatch_kernels.cuda.signatures import VARIANTS, translation_unit
from isobatch_kernels.cuda.source import FAMILIES, included, load_kernels, without_comments

NVCC = shutil.which("nvcc")


def test_every_kernel_has_a_body_and_buffers() -> None:
    """One brace opens what MLX puts into a function."""
    kernels = load_kernels()
    assert len(kernels) > 15
    for kernel in kernels.values():
        assert kernel.outputs, kernel.name
        assert kernel.body.startswith("{"), kernel.name
        assert kernel.body.count("{") == kernel.body.count("}"), kernel.name
        assert "//" not in kernel.body + kernel.header


def test_every_family_is_read() -> None:
    """A file that no list names would be forgotten."""
    folder = Path(load_kernels.__wrapped__.__code__.co_filename).parent
    assert {path.stem for path in folder.glob("*.cu")} == set(FAMILIES)
    assert set(VARIANTS) <= set(load_kernels())


def test_no_rounding_is_left_to_the_compiler() -> None:
    """Sums and products of floats go through the functions that are never contracted."""
    header = load_kernels()["norm"].header
    assert "__fmaf_rn" in header
    assert "__fadd_rn" in header
    for kernel in load_kernels().values():
        for call in ("sqrtf(", "expf(", "rsqrtf(", "__expf(", "__fdividef("):
            assert call not in kernel.header + kernel.body, kernel.name


def test_comments_go() -> None:
    """What is left keeps its order."""
    assert without_comments("a; // one\n\n  // two\n  b;\n") == "a;\nb;\n"


def test_included_text_is_short_and_names_shapes() -> None:
    """MLX adds an argument for a shape only where it finds its name."""
    kernel = load_kernels()["linear_rows"]
    short = included(kernel)
    assert len(short.header + short.body) < 600
    for name in ("q_shape", "w_shape", "bias_strides", "residual_strides"):
        assert name in short.body
    body = Path(short.body.split('"')[1])
    assert body.read_text(encoding="utf-8") == kernel.body


@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler (nvcc) on this machine")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("common", "weights")])
def test_sources_compile(family: str, tmp_path: Path) -> None:
    """For the H200's generation, with every set of template parameters that changes a path."""
    assert NVCC is not None
    kernels = [kernel for kernel in load_kernels().values() if kernel.family == family]
    source = tmp_path / f"{family}.cu"
    source.write_text(translation_unit(kernels), encoding="utf-8")
    run = subprocess.run(
        [NVCC, "-ptx", "-arch=sm_90", "-o", str(tmp_path / "out.ptx"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[:2000]
