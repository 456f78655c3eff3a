"""Reads the kernel files of this folder.

A file has helper functions first, then kernels. Lines that begin with `// @` direct the reader:
`@use a b` names files whose helpers come before this file's, `@kernel name` begins a kernel, and
`@inputs` and `@outputs` name its buffers in order. What follows is the kernel's body, in the form
that `mx.fast.cuda_kernel` takes: MLX writes the signature, with `name_shape` and `name_strides`
for every input whose body mentions them.
"""

from __future__ import annotations

import functools
import re
import tempfile
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

FAMILIES = (
    *("common", "weights", "quantize", "norm", "embed", "rope", "attention", "attention_prefill"),
    *("linear_rows", "linear_tiles", "dense", "statistics", "top_k"),
)
_DIRECTIVE = re.compile(r"^// @(\w+)\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel as text."""

    name: str
    family: str  # its file
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str


def family_text(family: str) -> str:
    """Text of one .cu file."""
    return (resources.files(__package__) / f"{family}.cu").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    """Text without comments and indentation."""
    lines = (re.sub(r"//[^\n]*", "", line).strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def _helpers(family: str, done: list[str]) -> str:
    """Helpers of a family and of those it uses, each once, in order of use."""
    if family in done:
        return ""
    done.append(family)
    own = re.split(r"^// @kernel ", family_text(family), maxsplit=1, flags=re.MULTILINE)[0]
    uses = [
        name for kind, names in _DIRECTIVE.findall(own) if kind == "use" for name in names.split()
    ]
    return "".join(_helpers(used, done) for used in uses) + own


@functools.cache
def load_kernels() -> dict[str, KernelSource]:
    """Every kernel by name."""
    kernels: dict[str, KernelSource] = {}
    for family in FAMILIES:
        header = without_comments(_helpers(family, []))
        sections = re.split(r"^(?=// @kernel )", family_text(family), flags=re.MULTILINE)[1:]
        for section in sections:
            directives = dict(_DIRECTIVE.findall(section))
            name = directives["kernel"].strip()
            if name in kernels:
                raise ValueError(f"[cuda] kernel names must be unique, got {name} twice")
            kernels[name] = KernelSource(
                name=name,
                family=family,
                inputs=tuple(directives["inputs"].split()),
                outputs=tuple(directives["outputs"].split()),
                header=header,
                body=without_comments(section),
            )
    return kernels


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="isobatch-cuda-")


def included(kernel: KernelSource) -> KernelSource:
    """The kernel with its text in files that are included.

    MLX hashes a kernel's text at every launch, so a short one saves microseconds.
    """
    folder = Path(_folder().name)
    paths = {"header": folder / f"{kernel.name}.cuh", "body": folder / f"{kernel.name}.cu"}
    paths["header"].write_text(kernel.header, encoding="utf-8")
    paths["body"].write_text(kernel.body, encoding="utf-8")
    # MLX adds an argument for each of these names that it finds in the body.
    wanted = sorted(set(re.findall(r"\b\w+_(?:shape|strides)\b", kernel.body)))
    return replace(
        kernel,
        header=f'#include "{paths["header"]}"\n',
        body=f'// {" ".join(wanted)}\n#include "{paths["body"]}"\n',
    )
