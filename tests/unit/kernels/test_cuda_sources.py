"""The CUDA kernels as text: how files are read, and that a CUDA compiler takes them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from isobatch_kernels.cuda.source import FAMILIES, device_text, load_kernels, without_comments
from tests.support.cuda_variants import VARIANTS, translation_unit

NVCC = shutil.which("nvcc")


def test_every_kernel_is_a_function_of_its_name() -> None:
    """Nothing else of a file is left outside it."""
    kernels = load_kernels()
    assert len(kernels) > 15
    for kernel in kernels.values():
        assert kernel.text.startswith("X1_KERNEL"), kernel.name
        assert f" {kernel.name}(" in kernel.text, kernel.name
        assert kernel.text.count("{") == kernel.text.count("}"), kernel.name
        assert "//" not in kernel.helpers + kernel.text


def test_every_kernel_waits_for_the_launch_in_front_of_it() -> None:
    """One that did not would read what is not yet written, or write what is still read."""
    for kernel in load_kernels().values():
        alone = kernel.family == "pack" or kernel.name in (
            "begin_step",
            "zero_blocks",
            "move_block",
        )
        assert ("x1_after_previous();" in kernel.text) != alone, kernel.name


def test_other_constants_are_refused() -> None:
    """A missing one would be found by a compiler only, on a device."""
    with pytest.raises(ValueError, match=r"constants of quantize must be .*got \['A'\]"):
        load_kernels()["quantize"].body({"A": 64})


def test_every_family_is_read() -> None:
    """A file that no list names would be forgotten."""
    folder = Path(load_kernels.__wrapped__.__code__.co_filename).parent
    assert {path.stem for path in folder.glob("*.cu")} == set(FAMILIES)
    assert set(VARIANTS) <= set(load_kernels())


def test_no_rounding_is_left_to_the_compiler() -> None:
    """Sums and products of floats go through the functions that are never contracted."""
    header = load_kernels()["norm_rows"].helpers
    assert "__fmaf_rn" in header
    assert "__fadd_rn" in header
    for kernel in load_kernels().values():
        for call in ("sqrtf(", "expf(", "rsqrtf(", "__expf(", "__fdividef("):
            assert call not in kernel.helpers + kernel.text, kernel.name


def test_comments_go() -> None:
    """What is left keeps its order."""
    assert without_comments("a; // one\n\n  // two\n  b;\n") == "a;\nb;\n"


@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler (nvcc) on this machine")
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("device", "common", "weights")]
)
def test_sources_compile(family: str, tmp_path: Path) -> None:
    """For the H200's generation, with every set of template parameters that changes a path."""
    assert NVCC is not None
    kernels = [kernel for kernel in load_kernels().values() if kernel.family == family]
    source = tmp_path / f"{family}.cu"
    source.write_text(device_text() + translation_unit(kernels), encoding="utf-8")
    run = subprocess.run(
        [NVCC, "-ptx", "-arch=sm_90", "-o", str(tmp_path / "out.ptx"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[:2000]
