"""Reads the kernel files of this folder.

A file has helper functions first, then kernels. Lines that begin with `// @` direct the reader:
`@use a b` names files whose helpers come before this file's, `@kernel name` begins a kernel, and
`@constants` names the integers that it is compiled for. device.cu alone speaks to the device.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

DEVICE: Final = "device"
FAMILIES: Final = (
    *(DEVICE, "common", "weights", "pack", "quantize", "norm", "embed", "rope", "attention"),
    *("attention_prefill", "linear_rows", "linear_tiles", "dense", "statistics", "top_k", "step"),
)
_DIRECTIVE = re.compile(r"^// @(\w+)\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel as text."""

    name: str
    family: str  # its file
    constants: tuple[str, ...]
    helpers: str  # of its file and those it uses, without the device's
    text: str

    def body(self, constants: Mapping[str, int]) -> str:
        """Helpers, constants and the kernel: what follows the device's text.

        Raises:
            ValueError: other constants than the kernel's.
        """
        if set(constants) != set(self.constants):
            raise ValueError(
                f"[cuda] constants of {self.name} must be {self.constants}, got {sorted(constants)}"
            )
        lines = "".join(f"constexpr int {name} = {constants[name]};\n" for name in self.constants)
        return f"{self.helpers}{lines}{self.text}"


def family_text(family: str) -> str:
    """Text of one .cu file."""
    return (resources.files(__package__) / f"{family}.cu").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    """Text without comments and indentation."""
    lines = (re.sub(r"//[^\n]*", "", line).strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


@functools.cache
def device_text() -> str:
    """What comes before every kernel on a device."""
    return without_comments(family_text(DEVICE))


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
        helpers = without_comments(_helpers(family, [DEVICE]))
        sections = re.split(r"^(?=// @kernel )", family_text(family), flags=re.MULTILINE)[1:]
        for section in sections:
            directives = dict(_DIRECTIVE.findall(section))
            name = directives["kernel"].strip()
            if name in kernels:
                raise ValueError(f"[cuda] kernel names must be unique, got {name} twice")
            kernels[name] = KernelSource(
                name=name,
                family=family,
                constants=tuple(directives.get("constants", "").split()),
                helpers=helpers,
                text=without_comments(section),
            )
    return kernels
