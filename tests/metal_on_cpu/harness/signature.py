"""Reads the kernel function in MLX's generated text: its name, its instance, its parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.rewrite import blank_comments, split_outside_brackets

# Numbers of emu_attribute in shim/emulation/entry.h.
ATTRIBUTES = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 1,
    "threadgroup_position_in_grid": 2,
    "threads_per_threadgroup": 3,
    "threadgroups_per_grid": 4,
    "threads_per_grid": 5,
    "dispatch_threads_per_threadgroup": 6,
    "thread_index_in_threadgroup": 7,
    "thread_index_in_simdgroup": 8,
    "simdgroup_index_in_threadgroup": 9,
    "simdgroups_per_threadgroup": 10,
    "threads_per_simdgroup": 11,
    "thread_execution_width": 11,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel function."""

    name: str
    is_buffer: bool
    index: int  # of the buffer, or the attribute's number


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a kernel function."""

    instance: str  # name with template arguments
    parameters: tuple[Parameter, ...]


def _matching(text: str, start: int) -> int:
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start - 1


def parse_signature(
    text: str, function: str | None = None, instance: str | None = None
) -> Signature:
    """Signature of the kernel `function`, or of the only one that MLX generated.

    A parameter without attribute takes the next buffer, as in Metal.
    """
    plain = blank_comments(text)
    name = re.escape(function) if function else r"custom_kernel_\w+"
    head = re.search(rf"\bkernel\b[^;{{}}()]*(?:\([^)]*\))?[^;{{}}()]*void\s+({name})\s*\(", plain)
    if head is None:
        raise MetalError(
            f"[signature] no kernel function {function or 'custom_kernel_*'} in the text"
        )
    function = head.group(1)
    if instance is None:
        wanted = re.search(
            rf"decltype\(({re.escape(function)}\s*<[^;]*?>)\)\s*{re.escape(function)}", plain
        )
        instance = wanted.group(1) if wanted else function
    parameters, next_buffer = [], 0
    for part in split_outside_brackets(plain[head.end() : _matching(plain, head.end())]):
        declared = re.search(r"(\w+)\s*(?:\[\[|$)", part.strip())
        buffer = re.search(r"\bbuffer\((\d+)\)", part)
        attribute = re.search(r"\[\[\s*(\w+)\s*\]\]", part)
        label = declared.group(1) if declared else "?"
        if buffer or (attribute is None and ("*" in part or "&" in part)):
            index = int(buffer.group(1)) if buffer else next_buffer
            next_buffer = index + 1
            parameters.append(Parameter(label, True, index))
        elif attribute and attribute.group(1) in ATTRIBUTES:
            parameters.append(Parameter(label, False, ATTRIBUTES[attribute.group(1)]))
        else:
            raise MetalError(f"[signature] parameter not understood: {part.strip()!r}")
    return Signature(instance, tuple(parameters))
