"""Counts the arithmetic of gemv_multi from compiled IR.

Run it as `python -m tests.metal_on_cpu.operation_counts`. A slot is one operation of one lane.
Counted are the operations of one sub-block of one output for V rows, after unrolling: a vector
operation counts once an element. Moves between vector elements, casts of bits and widening a half
that feeds an fma are free on Apple's GPUs (operands are 16-bit registers there) and are not
counted; nor are loads, address arithmetic and loop control.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from isobatch_kernels.metal.source import load_kernels
from tests.metal_on_cpu.harness.compiler import (
    HERE,
    CompileOptions,
    find_compiler,
    prepared_headers,
)
from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.rewrite import rewrite

_PROBE = """
extern "C" void probe(const uint4* w, const half* q, const size_t* x, const float* sums,
                      const float* blocks, const half* scales, const half* biases, float* acc) {{
  float p[{rows}];
  const size_t lane = 0;
  dot_rows<{bits}, {centred}, {b}, {rows}, 1>(w, &lane, q, x, 0, p);
  add_block<{rows}>(acc, p, sums, blocks, widen(scales[0]), widen(biases[0]));
}}
"""
_KINDS = {
    "integer": re.compile(
        r"= (?:and|or|xor|shl|lshr|ashr|sub|mul|add)\b.*? (<(\d+) x i\d+>|i\d+) "
    ),
    "half": re.compile(r"= f(?:add|sub|mul)\b.*? (<(\d+) x half>|half) "),
    "float": re.compile(r"= f(?:add|sub|mul)\b.*? (<(\d+) x float>|float) "),
    "fma": re.compile(r"call .*@llvm\.fma\.(?:v(\d+))?f32"),
    "convert": re.compile(r"= (?:uitofp|sitofp|fptosi|fptoui)\b"),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Slots of one sub-block of `b` weights for `rows` rows."""

    rows: int
    b: int
    decode: int  # integer and half operations
    arithmetic: int  # fma and float operations

    @property
    def bound(self) -> float:
        """What the paper model of speed allows."""
        return 3 + self.rows * (1 + 4 / self.b)

    @property
    def decode_per_weight(self) -> float:
        """Slots that do not depend on the row count."""
        return self.decode / self.b

    @property
    def per_weight(self) -> float:
        """All slots a weight."""
        return (self.decode + self.arithmetic) / self.b


def _is_address(line: str) -> bool:
    return " i64 " in line


def count(bits: int, b: int, rows: int) -> Counts:
    """Counts of gemv_multi for one weight format and row count."""
    compiler = find_compiler()
    if compiler is None:
        raise MetalError("[operation_counts] no clang++ was found")
    header = load_kernels()["gemv_multi"].header
    probe = _PROBE.format(bits=bits, centred=str(bits == 8).lower(), b=b, rows=rows)
    unit = (
        '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
        f"{rewrite(header)}\n{probe}"
    )
    flags = [f for f in CompileOptions().flags() if not f.startswith("-g")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "probe.ll")
        done = subprocess.run(
            [
                *(compiler, *flags, "-fno-vectorize", "-fno-slp-vectorize", "-S", "-emit-llvm"),
                *(
                    f"-I{HERE / 'shim'}",
                    f"-I{prepared_headers()}",
                    "-x",
                    "c++",
                    "-",
                    "-o",
                    str(out),
                ),
            ],
            input=unit,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MetalError(f"[operation_counts] {done.stderr[:2000]}")
        body = re.search(r"define[^\n]*@probe\(.*?^}", out.read_text(), re.DOTALL | re.MULTILINE)
    if body is None or re.search(r"^\s+br i1", body.group(0), re.MULTILINE):
        raise MetalError("[operation_counts] the probe was not unrolled")
    text = body.group(0)
    # The upper half of a 32-bit register is a register of its own.
    halves = re.findall(r"(%\d+) = lshr i32 %\d+, 16\n", text)
    upper = {name for name in halves if re.search(rf"trunc (?:nuw )?i32 {name} to i16", text)}
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if any(line.strip().startswith(f"{name} = lshr") for name in upper):
            continue
        for kind, pattern in _KINDS.items():
            if (match := pattern.search(line)) and not _is_address(line):
                found[kind] += next((int(g) for g in match.groups() if g and g.isdigit()), 1)
    return Counts(
        rows=rows,
        b=b,
        decode=found["integer"] + found["half"] + found["convert"],
        arithmetic=found["fma"] + found["float"],
    )


def main() -> int:
    """Prints the table."""
    print("bits  b   rows  slots/weight  decode/weight  bound 3+M(1+4/b)  loads/weight")
    for bits, b in ((4, 64), (4, 32), (8, 64), (8, 32)):
        for rows in (1, 2, 4, 8, 16, 24):
            c = count(bits, b, rows)
            # From the source: 16 bytes of weights, and 16 (8 bits: 8) bytes of each row's integers.
            loads = bits / 128 + rows / (8 if bits == 4 else 4)
            print(
                f"{bits:4} {b:3} {rows:5} {c.per_weight:12.2f} {c.decode_per_weight:14.2f}"
                f" {c.bound:16.2f} {loads:14.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
