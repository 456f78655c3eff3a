"""Two lints of Metal text: clang's address-space checks, and rules that no compiler here knows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.metal_on_cpu.harness.compiler import find_compiler
from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.rewrite import blank_comments, threadgroup_variables
from tests.metal_on_cpu.harness.signature import Signature

_DECLARATIONS = Path(__file__).resolve().parents[1] / "lint" / "metal_declarations.h"
_FLAGS = (
    *("-x", "cl", "-cl-std=clc++2021", "-target", "spir64-unknown-unknown", "-fsyntax-only"),
    *("-nostdinc", "-cl-no-stdinc", "-Wno-unknown-attributes", "-Wno-ignored-attributes"),
    *("-Wno-undefined-inline", "-Wno-undefined-internal", "-fno-caret-diagnostics"),
)
# Approximate in the default mode, or rounded differently by device; x1_* functions replace them.
_BARE_FUNCTIONS = (
    *("exp", "exp2", "exp10", "log", "log2", "log10", "sin", "cos", "tan", "sqrt", "rsqrt", "pow"),
    *("powr", "tanh", "sinh", "cosh", "divide", "fmod", "length", "normalize", "dot", "mix"),
)
_NOT_HERE = re.compile(r"\b(bfloat|bfloat16_t|tensor|os_log|mpp|coherent)\b")


def address_space_errors(text: str, signature: Signature) -> list[str]:
    """Errors of clang when Metal's address spaces are OpenCL's. Empty: clean.

    It is a lint and not Apple's compiler: what passes here may still be refused there.
    """
    out, position = [], 0
    for begin, end, names in threadgroup_variables(text):
        # Variables may stand in kernels only; a reference to some place keeps type and space. A
        # vector's name before a parenthesis would be its constructor.
        places = " ".join(
            f"using of_{n} = {t}; threadgroup of_{n} (&{n}){d} = *(threadgroup of_{n} (*){d})0;"
            for t, n, d in names
        )
        out += [text[position:begin], places, "\n" * text.count("\n", begin, end)]
        position = end
    plain = "".join([*out, text[position:]])
    plain = re.sub(r"template \[\[host_name[^;]*;", "", plain)
    plain = re.sub(r"\[\[[^\]]*\]\]", "", plain)
    plain = re.sub(r"#pragma METAL[^\n]*", "", plain)
    unit = f'#include "{_DECLARATIONS}"\n{plain}\n'
    if "<" in signature.instance:
        unit += f"template decltype({signature.instance}) {signature.instance};\n"
    compiler = find_compiler()
    if compiler is None:
        raise MetalError("[lint] no clang++ was found")
    done = subprocess.run(
        [compiler, *_FLAGS, "-"], input=unit, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    if done.returncode and not errors:
        errors = [done.stderr[:500]]
    return errors


def rule_errors(text: str) -> list[str]:
    """Breaches of this project's rules for kernels, by line."""
    errors = []
    plain = blank_comments(text)
    code = [line for line in plain.splitlines() if line.strip()]
    if not code or code[0].strip() != "#pragma METAL fp contract(off)":
        errors.append("`#pragma METAL fp contract(off)` must be the first line of code")
    for number, line in enumerate(plain.splitlines(), 1):
        for name in _BARE_FUNCTIONS:
            if re.search(rf"(?<![\w])(?:metal::|precise::|fast::)?{name}\s*\(", line):
                errors.append(f"line {number}: {name} is not an exact function")
        if newer := _NOT_HERE.search(line):
            errors.append(
                f"line {number}: {newer.group(1)} is newer than MSL 3.1, or not for kernels here"
            )
        if re.search(r"\bdouble\b|\bnew\b|\bvirtual\b|\bgoto\b|\[[&=]\]\s*\(", line):
            errors.append(f"line {number}: double, new, virtual, goto and lambdas are not Metal")
        unqualified = re.match(
            r"\s*(?:const\s+)?(float|half|int|uint|uint4|uint2|ushort|T)\s*\*\s*\w+\s*[=;]", line
        )
        if unqualified:
            errors.append(f"line {number}: a pointer must name its address space")
        if re.search(r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?![\w.])", line):
            errors.append(f"line {number}: floating-point literals must end with f")
    return errors
